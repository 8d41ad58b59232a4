#!/usr/bin/env python3
"""Convert a Q8_0 GGUF of a Llama model to an MLX model with exactly the same weights.

A Q8_0 block holds 32 weights d * q, with d in half precision and q from -128 to 127. A group of MLX's
affine 8-bit quantisation holds 32 weights scale * code + bias, with codes from 0 to 255. With scale = d, code
= q + 128 and bias = -128 * d, both represent the same numbers without rounding. Norms stay in single
precision, so that MLX computes in single precision.

    scripts/make_demo_mlx.py models/demo-target-q8_0.gguf path/to/demo-target-hf models/demo-mlx
    scripts/make_demo_mlx.py models/demo-draft-q8_0.gguf path/to/demo-draft-hf models/demo-mlx-draft

The second argument is the same model in Hugging Face format. The script copies its tokenizer and
configuration, and compares its weights with the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GROUP_SIZE = 32
_SAFETENSORS = {"F16": np.float16, "F32": np.float32, "U32": np.uint32}
_NAMES = {np.dtype(kind): name for name, kind in _SAFETENSORS.items()}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_LAYER_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def mlx_name(name: str) -> str:
    """Return the MLX module of a GGUF tensor: `model.layers.3.self_attn.q_proj` for `blk.3.attn_q.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_MODULES:
        return _TOP_MODULES[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_MODULES[part]}"


def row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the order that turns the rows of a GGUF query or key projection into Hugging Face's order.

    For each head, llama.cpp interleaves the two halves of the rows, because of how its RoPE pairs dimensions.

    Returns:
        Indices of GGUF rows, [rows].
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def to_affine(blocks: NDArray[np.uint8]) -> tuple[Array, Array, Array]:
    """Convert rows of Q8_0 blocks to MLX's affine quantisation.

    Args:
        blocks: Bytes of the blocks, uint8 [rows, bytes].

    Returns:
        The codes, packed four to a uint32 [rows, columns / 4], and the scales and biases, each float16
        [rows, columns / 32].
    """
    rows = blocks.reshape(blocks.shape[0], -1, 2 + GROUP_SIZE)
    scales = rows[:, :, :2].copy().view(np.float16)[:, :, 0]
    codes = rows[:, :, 2:] ^ 0x80  # Flipping the sign bit of two's complement gives q + 128.
    packed = np.ascontiguousarray(codes).reshape(blocks.shape[0], -1).view("<u4")
    with np.errstate(over="ignore"):
        biases = scales * np.float16(-128)
    if not np.array_equal(biases.astype(np.float32), scales.astype(np.float32) * -128):
        raise SystemExit(
            "error: a scale is too large for a half-precision bias; store scales and biases in F32"
        )
    return packed, scales, biases


def from_affine(packed: Array, scales: Array, biases: Array) -> NDArray[np.float32]:
    """Return the weights of MLX's affine quantisation, float32 [rows, columns]."""
    codes = packed.view(np.uint8).reshape(*scales.shape, GROUP_SIZE).astype(np.float32)
    wide = scales.astype(np.float32)[:, :, None] * codes + biases.astype(np.float32)[:, :, None]
    return wide.reshape(scales.shape[0], -1)


def convert(reader: gguf.GGUFReader) -> dict[str, Array]:
    """Return the tensors of the MLX model by name."""
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    tensors: dict[str, Array] = {}
    for tensor in reader.tensors:
        name, data = mlx_name(tensor.name), np.asarray(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            tensors[f"{name}.weight"] = data
            continue
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q8_0:
            raise SystemExit(
                f"error: {tensor.name} has type {tensor.tensor_type.name}; use a GGUF file with Q8_0 weights"
            )
        part = tensor.name.split(".")[-2]
        if part in heads:
            data = data[row_order(data.shape[0], heads[part])]
        packed, scales, biases = to_affine(data)
        if part == "token_embd":
            # MLX dequantises embeddings in the precision of their scales. Half precision would round them.
            scales, biases = scales.astype(np.float32), biases.astype(np.float32)
        tensors |= {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write tensors to a safetensors file, sorted by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, data in sorted(tensors.items()):
        header[name] = {
            "dtype": _NAMES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in sorted(tensors.items()):
            file.write(np.ascontiguousarray(data).tobytes())


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return the tensors of a safetensors file by name."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
            _SAFETENSORS[entry["dtype"]],
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def compare(tensors: dict[str, Array], original: dict[str, Array]) -> float:
    """Return the largest difference from the original weights in quantisation steps. Norms must be equal."""
    if different := {name.rpartition(".")[0] for name in tensors} ^ {n.rpartition(".")[0] for n in original}:
        raise SystemExit(f"error: only one of the two models has {', '.join(sorted(different))}")
    worst = 0.0
    for name, weights in original.items():
        module = name.rpartition(".")[0]
        if f"{module}.scales" not in tensors:
            if not np.array_equal(tensors[name].astype(weights.dtype), weights):
                raise SystemExit(f"error: {name} differs from the original")
            continue
        scales = tensors[f"{module}.scales"]
        weights_read = from_affine(tensors[name], scales, tensors[f"{module}.biases"])
        steps = np.abs(weights_read - weights.astype(np.float32)) / np.repeat(
            scales.astype(np.float32), GROUP_SIZE, axis=1
        )
        worst = max(worst, float(np.nanmax(steps)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the Q8_0 GGUF")
    parser.add_argument("original", type=Path, help="the folder of the same model in the Hugging Face format")
    parser.add_argument("result", type=Path, help="the folder to write")
    args = parser.parse_args()
    tensors = convert(gguf.GGUFReader(args.source))
    worst = compare(tensors, read_safetensors(args.original / "model.safetensors"))
    # Rounding to 8 bits changes a weight by at most half a step. Wrongly ordered rows would differ by dozens
    # of steps.
    if worst > 0.6:
        raise SystemExit(
            f"error: a weight differs by {worst:.1f} quantisation steps; check that {args.original} is"
            " the same model"
        )
    config = json.loads((args.original / "config.json").read_text(encoding="utf-8"))
    config |= json.loads((args.original / "generation_config.json").read_text(encoding="utf-8"))
    for training_key in ("do_sample", "max_new_tokens", "initializer_range", "pretraining_tp"):
        config.pop(training_key, None)
    config["torch_dtype"] = "float32"
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": 8}
    args.result.mkdir(parents=True, exist_ok=True)
    (args.result / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        (args.result / name).write_bytes((args.original / name).read_bytes())
    write_safetensors(args.result / "model.safetensors", tensors)
    print(f"{args.result}: {len(tensors)} tensors, largest difference {worst:.2f} quantisation steps")


if __name__ == "__main__":
    main()
