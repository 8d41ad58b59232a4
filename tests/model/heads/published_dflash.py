"""Write random DFlash and DSpark heads in the layouts in which they are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Layout: TypeAlias = Literal["z-lab", "z-lab with sliding windows", "DeepSeek", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("z-lab", "z-lab with sliding windows", "DeepSeek", "speculators")
FEED_FORWARD, LAYERS, RANK, WINDOW = 64, 2, 8, 8
# A tensor that only DFlash 2 heads have.
SELECTOR = {"candidate_selector.hidden_projection.weight": np.zeros((8, 32), np.float32)}


def write_dflash_head(
    folder: Path,
    layout: Layout = "z-lab",
    *,
    vocab: int,
    size: int = 32,
    draft_vocab: int | None = None,
    states: Sequence[int] = (0, 1, 3),
    block: int = 6,
    mask: int = 7,
    changes: dict[str, NDArray[Any] | None] | None = None,
    **settings: Any,
) -> dict[str, NDArray[np.float32]]:
    """Write a head with two attention heads, and return its tensors.

    `states` are the layers whose inputs it reads. With `draft_vocab`, it drafts only this many tokens,
    starting at token 7. `changes` replaces tensors, or removes those that are None.
    """
    random = np.random.default_rng(11)
    folder.mkdir(parents=True, exist_ok=True)
    layer_config: dict[str, Any] = {
        "hidden_size": size, "intermediate_size": FEED_FORWARD, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "vocab_size": vocab, "max_position_embeddings": 512, "hidden_act": "silu",
        "model_type": "qwen3",
    }  # fmt: skip
    outputs = [state - 1 for state in states]
    config: dict[str, Any]
    if layout == "speculators":
        config = {
            "speculators_model_type": "dspark", "transformer_layer_config": layer_config,
            "aux_hidden_state_layer_ids": list(states), "block_size": block, "mask_token_id": mask,
            "markov_rank": RANK, "markov_head_type": "vanilla", "sample_from_anchor": False,
        }  # fmt: skip
    elif layout == "DeepSeek":
        config = layer_config | {
            "architectures": ["Qwen3DSparkModel"], "target_layer_ids": outputs, "block_size": block,
            "mask_token_id": mask, "markov_rank": RANK, "markov_head_type": "vanilla",
        }  # fmt: skip
    else:
        config = layer_config | {
            "architectures": ["DFlashDraftModel"], "block_size": block,
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": outputs},
        }  # fmt: skip
        if layout == "z-lab with sliding windows":
            config |= {
                "layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW,
                "is_causal": False,
            }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | settings))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(states) * size), "hidden_norm.weight": (size,), "norm.weight": (size,),
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (size,), "post_attention_layernorm": (size,),
                "self_attn.q_proj": (32, size), "self_attn.k_proj": (16, size),
                "self_attn.v_proj": (16, size), "self_attn.o_proj": (size, 32),
                "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
                "mlp.gate_proj": (FEED_FORWARD, size), "mlp.up_proj": (FEED_FORWARD, size),
                "mlp.down_proj": (size, FEED_FORWARD),
            }.items()
        }  # fmt: skip
    if "markov_rank" in config:
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab or vocab, RANK)
        shapes["confidence_head.proj.weight"], shapes["confidence_head.proj.bias"] = (1, size + RANK), (1,)
        # DeepSeek ships copies of the target's tensors. Incorrect copies must not matter.
        shapes["embed_tokens.weight"] = shapes["lm_head.weight"] = (vocab, size)
    if draft_vocab:
        shapes["lm_head.weight"] = (draft_vocab, size)
    tensors: dict[str, Any] = {
        name: (random.normal(size=shape) / np.sqrt(shape[-1]) + (len(shape) == 1)).astype(np.float16)
        for name, shape in shapes.items()
    }
    if draft_vocab:
        tensors["d2t"] = np.full(draft_vocab, 7, np.int64)
    for name, value in (changes or {}).items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
