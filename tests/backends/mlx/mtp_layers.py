"""Write layers for multi-token prediction (MTP) for a tiny MLX model, in a separate file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.backends.mlx.tiny_checkpoints import configuration, write_checkpoint
from tests.safetensors_files import write_safetensors


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


# Kinds of models with numbered MTP layers, with the kind of tiny model to start from and its changed
# settings.
NUMBERED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": (
        "deepseek_v3",
        {
            "model_type": "glm4_moe",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "mimo": ("qwen2", {"model_type": "mimo"}),
}


def write_numbered_mtp_layer(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a tiny model with an MTP layer that repeats its last layer, named as in the original models."""
    base, changes = NUMBERED[kind]
    write_checkpoint(folder, base, config=changes | settings)
    config = json.loads((folder / "config.json").read_text())
    size, last = config["hidden_size"], config["num_hidden_layers"] - 1
    layer = {
        name.removeprefix(f"model.layers.{last}."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(f"model.layers.{last}.")
    }
    random = np.random.default_rng(1)
    matrix = random.normal(size=(size, 2 * size)) / size**0.5
    norms = [1 + 0.1 * random.normal(size=size) for _ in range(3)]
    if kind == "mimo":
        prefix, own = "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "final_layernorm")
        layer["input_proj.weight"] = matrix
    else:
        prefix, own = f"model.layers.{last + 1}.", ("enorm", "hnorm", "shared_head.norm")
        layer |= {"eh_proj.weight": matrix, "embed_tokens.weight": np.zeros((config["vocab_size"], size))}
        layer["shared_head.head.weight"] = np.zeros((config["vocab_size"], size))
    layer |= {f"{name}.weight": norm for name, norm in zip(own, norms, strict=True)}
    layer = _as_published(layer)
    save_file(
        {prefix + name: tensor.astype(np.float32) for name, tensor in layer.items()},
        folder / "mtp.safetensors",
    )
    return folder


def _as_published(layer: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Undo mlx-lm's changes to a layer: split the stacked experts and merge the two MLA matrices."""
    published: dict[str, NDArray[Any]] = {}
    for name, tensor in layer.items():
        if ".switch_mlp." in name:
            for expert, own in enumerate(tensor):
                published[name.replace("switch_mlp", f"experts.{expert}")] = own
        else:
            published[name] = tensor
    if "self_attn.embed_q.weight" in published:
        keys = published.pop("self_attn.embed_q.weight").swapaxes(-1, -2)
        both = np.concatenate([keys, published.pop("self_attn.unembed_out.weight")], axis=1)
        published["self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return published


def quantise_mtp(folder: Path, mode: str, bits: int, group_size: int, *, stacked: bool) -> Path:
    """Quantise the matrices in `mtp.safetensors` as MTPLX does, and stack the experts if `stacked`."""
    weights = _loaded(folder)
    if stacked:
        weights = _stacked(weights)
    for name, weight in list(weights.items()):
        if weight.ndim > 1:
            base = name.removesuffix("weight")
            packed, scales, *biases = mx.quantize(weight, group_size, bits, mode=mode)
            weights |= {name: packed, f"{base}scales": scales}
            weights |= {f"{base}biases": one for one in biases}
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    return folder


def dequantise_mtp(folder: Path, mode: str, bits: int, group_size: int) -> Path:
    """Undo `quantise_mtp`, which leaves the rounded weights."""
    stored = _loaded(folder)
    weights = {}
    for name, weight in stored.items():
        base, _, part = name.rpartition(".")
        scales, biases = stored.get(f"{base}.scales"), stored.get(f"{base}.biases")
        if part == "weight" and scales is not None:
            weights[name] = mx.dequantize(weight, scales, biases, group_size, bits, mode).astype(mx.float32)
        elif part not in ("scales", "biases"):
            weights[name] = weight
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    return folder


def _loaded(folder: Path) -> dict[str, Any]:
    """The layer's tensors, read before the file is written again."""
    weights: Any = mx.load(str(folder / "mtp.safetensors"))
    mx.eval(weights)
    return dict(weights)


def _stacked(weights: dict[str, Any]) -> dict[str, Any]:
    experts = {name: one for name, one in weights.items() if ".experts." in name}
    stacked = {name: one for name, one in weights.items() if name not in experts}
    for name in ("gate_proj", "up_proj", "down_proj"):
        own = [one for key, one in experts.items() if key.endswith(f".{name}.weight")]
        stacked[f"mtp.layers.0.mlp.switch_mlp.{name}.weight"] = mx.stack(own)
    return stacked


def repeat_layer(folder: Path, prefix: str, copies: int, *, neutral: bool = False) -> Path:
    """Add numbered copies of an MTP layer after it. Neutral copies return their input unchanged.

    Args:
        folder: The model.
        prefix: The start of the names of the layer's tensors, up to its number, such as `mtp.layers.`.
        copies: Number of copies.
        neutral: Whether to zero the output matrices of the copies.
    """
    weights = _loaded(folder)
    first = min(int(name.removeprefix(prefix).split(".")[0]) for name in weights if name.startswith(prefix))
    own = f"{prefix}{first}."
    for name, weight in list(weights.items()):
        if name.startswith(own):
            zero = neutral and ("o_proj" in name or "down_proj" in name)
            for copy in range(1, copies + 1):
                renamed = f"{prefix}{first + copy}.{name.removeprefix(own)}"
                weights[renamed] = mx.zeros_like(weight) if zero else weight
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    return folder


def write_fp8_model(folder: Path, kind: str, *, dequantised: bool) -> Path:
    """Write a tiny model with an MTP layer, both in FP8 with a scale for each block of 128 x 128 weights.

    Args:
        folder: The folder to write.
        kind: One of `NUMBERED`.
        dequantised: Whether to write the rounded weights in BF16 instead. Drafts and replies are the same.
    """
    write_numbered_mtp_layer(folder, kind, moe_intermediate_size=160, intermediate_size=160)
    for file in (folder / "model.safetensors", folder / "mtp.safetensors"):
        tensors = load_file(file)
        if file.stem == "model":
            tensors = _as_published(tensors)
        _write_fp8(file, tensors, dequantised=dequantised)
    return folder


def _write_fp8(file: Path, tensors: dict[str, NDArray[Any]], *, dequantised: bool) -> None:
    written: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            written[name] = ("F32", tensor.astype(np.float32))
            continue
        codes, scales = _in_fp8(tensor)
        if dequantised:
            factors = scales.repeat(128, 0)[: len(tensor)].repeat(128, 1)[:, : tensor.shape[1]]
            rounded = (mx.from_fp8(codes, mx.bfloat16) * mx.array(factors)).astype(mx.bfloat16)
            written[name] = ("BF16", np.array(rounded.view(mx.uint16)))
        else:
            written |= {name: ("F8_E4M3", np.array(codes)), f"{name}_scale_inv": ("F32", scales)}
    write_safetensors(file, written)


def _in_fp8(matrix: NDArray[Any]) -> tuple[mx.array, NDArray[np.float32]]:
    """Return a matrix in FP8, and its scales by block."""
    padded = np.pad(matrix, [(0, -size % 128) for size in matrix.shape])
    tiles = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scales = (np.abs(tiles).max(axis=(1, 3)) / 448).astype(np.float32)
    codes = mx.to_fp8(mx.array(tiles / scales[:, None, :, None])).reshape(padded.shape)
    return codes[: matrix.shape[0], : matrix.shape[1]], scales
