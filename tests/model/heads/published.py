"""Write random EAGLE heads in the layouts in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.model.heads.torch_files import write_torch_file

Layout: TypeAlias = Literal["SafeAILab", "NVIDIA", "speculators", "EAGLE-1"]
LAYOUTS: tuple[Layout, ...] = ("SafeAILab", "NVIDIA", "speculators", "EAGLE-1")
FeedForward = 64


def write_head(
    folder: Path,
    layout: Layout = "SafeAILab",
    *,
    size: int = 32,
    vocab: int,
    draft_vocab: int | None = None,
    seed: int = 1,
    pickled: bool = False,
    own_embeddings: bool = False,
    changes: dict[str, NDArray[Any] | None] | None = None,
    **settings: Any,
) -> Path:
    """Write a head with two attention heads.

    With `draft_vocab`, it drafts only this many tokens, starting at token 7. `changes` replaces tensors, or
    removes
    those that are None.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "hidden_size": size, "intermediate_size": FeedForward, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": vocab, "max_position_embeddings": 512, "hidden_act": "silu", "num_hidden_layers": 1,
        "model_type": "llama",
    } | settings  # fmt: skip
    fused = 3 * int(config.get("target_hidden_size") or size)
    first = layout == "EAGLE-1"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size if first else fused),
        "layer.post_attention_layernorm.weight": (size,),
        **{f"layer.mlp.{name}_proj.weight": (FeedForward, size) for name in ("gate", "up")},
        "layer.mlp.down_proj.weight": (size, FeedForward),
        "layer.self_attn.o_proj.weight": (size, 32),
    }
    inputs = size if first else 2 * size
    shapes |= {
        f"layer.self_attn.{name}_proj.weight": (rows, inputs)
        for name, rows in zip("qkv", (32, 16, 16), strict=True)
    }
    if first:
        shapes["fc.bias"] = (size,)
    else:
        shapes |= {f"layer.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")}
        shapes |= {"norm.weight": (size,), "lm_head.weight": (draft_vocab or vocab, size)}
    if first or own_embeddings:
        shapes["embed_tokens.weight"] = (vocab, size)
    tensors = {name: _random(random, shape) for name, shape in shapes.items()}
    if draft_vocab:
        tensors["d2t"] = np.full(draft_vocab, 7, np.int64)
        if layout != "NVIDIA":
            tensors["t2d"] = np.isin(np.arange(vocab), np.arange(draft_vocab) + 7)
    for name, array in (changes or {}).items():
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
    prefix = "midlayer." if layout == "SafeAILab" else "layers.0."
    tensors = {
        name.replace("layer.", prefix, 1) if name.startswith("layer.") else name: one
        for name, one in tensors.items()
    }
    (folder / "config.json").write_text(json.dumps(_arranged(config, layout)))
    if pickled:
        write_torch_file(
            folder / "pytorch_model.bin", {name: one for name, one in tensors.items() if name != "t2d"}
        )
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def _random(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    noise = random.normal(size=shape)
    # Use norms near 1, and matrices that preserve the size of their inputs.
    return (1 + 0.1 * noise if len(shape) == 1 else 2 * noise / shape[-1] ** 0.5).astype(np.float16)


def _arranged(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The settings where this publisher writes them."""
    if layout == "EAGLE-1":
        return config | {"architectures": ["LlamaForCausalLM"], "bias": True}
    if layout == "SafeAILab":
        return config | {"architectures": ["LlamaForCausalLMEagle3"]}
    names = ("norm_before_fc", "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids")
    own = {name: config.pop(name) for name in names if name in config}
    if layout == "NVIDIA":
        return config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own}
    target_size = config.pop("target_hidden_size", None)
    return own | {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "model_type": "eagle3",
        "target_hidden_size": target_size, "transformer_layer_config": config,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
    }  # fmt: skip
