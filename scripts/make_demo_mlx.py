#!/usr/bin/env python3
"""Write a Q8_0 GGUF of a Llama model as an MLX model with the very same weights.

A Q8_0 block is 32 numbers d * q with a half precision d and q from -128 to 127; a group of MLX's affine 8-bit
form is 32 times scale * code + bias with codes from 0 to 255. So scale = d, code = q + 128, bias = -128 * d
say the same numbers, and nothing is rounded. Norms stay in single precision, which makes MLX compute in it.

    scripts/make_demo_mlx.py models/demo-target-q8_0.gguf path/to/demo-target-hf models/demo-mlx
    scripts/make_demo_mlx.py models/demo-draft-q8_0.gguf path/to/demo-draft-hf models/demo-mlx-draft

The second argument is the same model in Hugging Face's form: its tokenizer and configuration are taken over,
and its weights are compared with what was written.
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

GROUP = 32
_SAFETENSORS = {"F16": np.float16, "F32": np.float32, "U32": np.uint32}
_NAMES = {np.dtype(kind): name for name, kind in _SAFETENSORS.items()}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PARTS = {
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
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def mlx_name(name: str) -> str:
    """What MLX calls a GGUF tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj`."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return _WHOLE[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}"


def row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Which GGUF row each row of q or k is: llama.cpp interleaves the halves that RoPE rotates."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def to_affine(blocks: NDArray[np.uint8]) -> tuple[Array, Array, Array]:
    """Rows of Q8_0 blocks -> (codes packed four to a uint32, scales, biases)."""
    rows = blocks.reshape(blocks.shape[0], -1, 2 + GROUP)
    scales = rows[:, :, :2].copy().view(np.float16)[:, :, 0]
    codes = rows[:, :, 2:] ^ 0x80  # q + 128: two's complement with the sign bit turned over
    packed = np.ascontiguousarray(codes).reshape(blocks.shape[0], -1).view("<u4")
    with np.errstate(over="ignore"):
        biases = scales * np.float16(-128)
    if not np.array_equal(biases.astype(np.float32), scales.astype(np.float32) * -128):
        raise SystemExit("error: a scale is too large for its bias to be half precision; store them as F32")
    return packed, scales, biases


def from_affine(packed: Array, scales: Array, biases: Array) -> NDArray[np.float32]:
    """The numbers that an MLX group stands for."""
    codes = packed.view(np.uint8).reshape(*scales.shape, GROUP).astype(np.float32)
    wide = scales.astype(np.float32)[:, :, None] * codes + biases.astype(np.float32)[:, :, None]
    return wide.reshape(scales.shape[0], -1)


def convert(reader: gguf.GGUFReader) -> dict[str, Array]:
    """The tensors of the MLX model."""
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
            raise SystemExit(f"error: {tensor.name} is {tensor.tensor_type.name}; only Q8_0 maps exactly")
        part = tensor.name.split(".")[-2]
        if part in heads:
            data = data[row_order(data.shape[0], heads[part])]
        packed, scales, biases = to_affine(data)
        if part == "token_embd":
            # MLX unpacks embeddings in the precision of their scales, and half of it would round them.
            scales, biases = scales.astype(np.float32), biases.astype(np.float32)
        tensors |= {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write tensors in the safetensors format, in the order of their names."""
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
    """The tensors of a safetensors file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw[start + about["data_offsets"][0] : start + about["data_offsets"][1]],
            _SAFETENSORS[about["dtype"]],
        ).reshape(about["shape"])
        for name, about in header.items()
    }


def compare(tensors: dict[str, Array], original: dict[str, Array]) -> float:
    """The largest difference to the original weights, in quantisation steps (norms: must be equal)."""
    if missing := {name.rpartition(".")[0] for name in tensors} ^ {n.rpartition(".")[0] for n in original}:
        raise SystemExit(f"error: the two models differ in {', '.join(sorted(missing))}")
    worst = 0.0
    for name, weights in original.items():
        module = name.rpartition(".")[0]
        if f"{module}.scales" not in tensors:
            if not np.array_equal(tensors[name].astype(weights.dtype), weights):
                raise SystemExit(f"error: {name} differs from the original")
            continue
        scales = tensors[f"{module}.scales"]
        ours = from_affine(tensors[name], scales, tensors[f"{module}.biases"])
        steps = np.abs(ours - weights.astype(np.float32)) / np.repeat(
            scales.astype(np.float32), GROUP, axis=1
        )
        worst = max(worst, float(np.nanmax(steps)))
    return worst


def main() -> None:
    """Read, write, compare."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("source", type=Path, help="the Q8_0 GGUF")
    parser.add_argument("original", type=Path, help="the folder of the same model in Hugging Face's form")
    parser.add_argument("result", type=Path, help="the folder to write")
    given = parser.parse_args()
    tensors = convert(gguf.GGUFReader(given.source))
    worst = compare(tensors, read_safetensors(given.original / "model.safetensors"))
    # Rounding to the nearest of 8 bits is half a step; a wrong order of rows would be dozens.
    if worst > 0.6:
        raise SystemExit(f"error: weights are {worst:.1f} quantisation steps from the original")
    config = json.loads((given.original / "config.json").read_text(encoding="utf-8"))
    config |= json.loads((given.original / "generation_config.json").read_text(encoding="utf-8"))
    for only_for_training in ("do_sample", "max_new_tokens", "initializer_range", "pretraining_tp"):
        config.pop(only_for_training, None)
    config["torch_dtype"] = "float32"
    config["quantization"] = {"group_size": GROUP, "bits": 8}
    given.result.mkdir(parents=True, exist_ok=True)
    (given.result / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        (given.result / name).write_bytes((given.original / name).read_bytes())
    write_safetensors(given.result / "model.safetensors", tensors)
    print(f"{given.result}: {len(tensors)} tensors, at most {worst:.2f} steps from the original")


if __name__ == "__main__":
    main()
