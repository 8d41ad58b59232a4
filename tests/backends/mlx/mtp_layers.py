"""Writes layers for multi-token prediction (MTP), in a file of their own, for a tiny MLX model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.backends.mlx.tiny_checkpoints import configuration


def write_mtp_layer(folder: Path, *, fused: bool = False, **changes: NDArray[Any] | None) -> Path:
    """Add a random MTP layer, named as in the original models, to a tiny Qwen3-Next model."""
    random, config = np.random.default_rng(0), configuration("qwen3_next")
    size, heads, head_size, kv = (
        64,
        config["num_attention_heads"],
        config["head_dim"],
        config["num_key_value_heads"],
    )
    inner, experts = config["moe_intermediate_size"], config["num_experts"]
    matrices = {
        "fc.weight": (size, 2 * size),
        "layers.0.self_attn.q_proj.weight": (2 * heads * head_size, size),
        "layers.0.self_attn.k_proj.weight": (kv * head_size, size),
        "layers.0.self_attn.v_proj.weight": (kv * head_size, size),
        "layers.0.self_attn.o_proj.weight": (size, heads * head_size),
        "layers.0.mlp.gate.weight": (experts, size),
        "layers.0.mlp.shared_expert_gate.weight": (1, size),
    }
    for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
        matrices[f"layers.0.mlp.shared_expert.{name}_proj.weight"] = (rows, columns)
        for expert in range(experts):
            matrices[f"layers.0.mlp.experts.{expert}.{name}_proj.weight"] = (rows, columns)
    norms = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    norms += [f"layers.0.{name}_layernorm" for name in ("input", "post_attention")]
    tensors = {name: 2 * random.normal(size=shape) / shape[-1] ** 0.5 for name, shape in matrices.items()}
    # Original models store the difference to 1.
    tensors |= {f"{name}.weight": 0.1 * random.normal(size=size) for name in norms}
    tensors |= {
        f"layers.0.self_attn.{name}_norm.weight": 0.1 * random.normal(size=head_size) for name in ("q", "k")
    }
    if fused:
        own = {
            name: np.stack(
                [tensors.pop(f"layers.0.mlp.experts.{one}.{name}_proj.weight") for one in range(experts)]
            )
            for name in ("gate", "up", "down")
        }
        tensors["layers.0.mlp.experts.gate_up_proj"] = np.concatenate([own["gate"], own["up"]], axis=1)
        tensors["layers.0.mlp.experts.down_proj"] = own["down"]
    for name, change in changes.items():
        tensors.pop(name)
        if change is not None:
            tensors[name] = change
    named = {f"mtp.{name}": tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(named, folder / "mtp.safetensors")
    return folder
