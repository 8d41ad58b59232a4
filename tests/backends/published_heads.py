"""Random heads in the layouts in which heads are published on Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.backends.tiny_models import WORDS

VOCAB = 259 + len(WORDS)


def write_published(folder: Path, *, prefix: str = "midlayer", **changes: object) -> Path:
    """A random head for the tiny target in the layout of published heads."""
    random = np.random.default_rng(1)
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc.weight": (32, 96), "lm_head.weight": (100, 32), "norm.weight": (32,),
        **{f"{prefix}.{norm}.weight": (32,) for norm in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm")},
        f"{prefix}.self_attn.q_proj.weight": (32, 64), f"{prefix}.self_attn.k_proj.weight": (16, 64),
        f"{prefix}.self_attn.v_proj.weight": (16, 64), f"{prefix}.self_attn.o_proj.weight": (32, 32),
        f"{prefix}.mlp.gate_proj.weight": (64, 32), f"{prefix}.mlp.up_proj.weight": (64, 32),
        f"{prefix}.mlp.down_proj.weight": (32, 64),
    }  # fmt: skip
    tensors: dict[str, Any] = {
        name: random.normal(size=shape).astype(np.float16) for name, shape in shapes.items()
    }
    tensors["d2t"] = np.full(100, 7, np.int64)
    save_file(tensors, folder / "model.safetensors")
    return folder
