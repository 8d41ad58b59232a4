#!/usr/bin/env python3
"""Enlarge an EAGLE-3 head for a target that `scripts/inflate_gguf.py` enlarged.

The enlarged head drafts the same tokens, but costs as much as the head of a large model. It is in F16.

    scripts/inflate_eagle.py models/demo-head-q8_0.gguf big-eagle3.gguf --dim 2048 --ffn 5632 --step 2

--step is the number of layers of the enlarged target for each layer of the original one.
"""

from __future__ import annotations

import argparse
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

_Array = NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the GGUF head to enlarge")
    parser.add_argument("result", help="the GGUF file to write")
    parser.add_argument("--dim", type=int, required=True, help="embedding width of the enlarged target")
    parser.add_argument("--ffn", type=int, required=True, help="new feed-forward width")
    parser.add_argument("--step", type=int, required=True, help="new layers per old layer of the target")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.source)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    old = int(metadata["eagle3.embedding_length"])
    if args.dim % old:
        raise SystemExit(f"error: --dim must be a multiple of {old}")
    times = args.dim // old
    changes = {
        "eagle3.embedding_length": args.dim,
        "eagle3.target_hidden_size": args.dim,
        "eagle3.feed_forward_length": args.ffn,
        "eagle3.attention.head_count": metadata["eagle3.attention.head_count"] * times,
        "eagle3.attention.head_count_kv": metadata["eagle3.attention.head_count_kv"] * times,
        "eagle3.attention.layer_norm_rms_epsilon": metadata["eagle3.attention.layer_norm_rms_epsilon"]
        / times,
        "eagle3.target_layers": [layer * args.step for layer in metadata["eagle3.target_layers"]],
    }
    writer = gguf.GGUFWriter(args.result, "eagle3", use_temp_file=True)
    for key, field in reader.fields.items():
        if key in metadata:
            kinds = field.types
            writer.add_key_value(
                key,
                changes.get(key, metadata[key]),
                kinds[0],
                sub_type=kinds[1] if len(kinds) > 1 else None,
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, _enlarged(tensor.name, _values(tensor), old, args))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(tensor: gguf.ReaderTensor) -> _Array:
    """Return the values of a tensor in any format. Token ids stay integers."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.I64:
        return np.asarray(tensor.data)
    return dequantize(tensor.data, tensor.tensor_type)


def _enlarged(name: str, weights: _Array, old: int, args: argparse.Namespace) -> _Array:
    """Return a padded tensor. New hidden values stay zero, as in the enlarged target."""
    dim, times = args.dim, args.dim // old
    if name == "d2t":
        return weights
    if weights.ndim == 1:
        # As in `inflate_gguf.py`, the gains compensate for the zeros in the root mean square.
        return np.concatenate([weights / np.sqrt(times), np.ones(dim - old)]).astype(np.float32)
    kind = name.removeprefix("blk.0.").removesuffix(".weight")
    heads = kind in ("attn_q", "attn_k", "attn_v")
    shape = {
        "output": (len(weights), dim),
        "token_embd": (len(weights), dim),
        "fc": (dim, 3 * dim),
        "attn_output": (dim, weights.shape[1] * times),
        "ffn_gate": (args.ffn, dim),
        "ffn_up": (args.ffn, dim),
        "ffn_down": (dim, args.ffn),
    }.get(kind, (weights.shape[0] * times, 2 * dim))
    result = np.zeros(shape, np.float16)
    # The columns of some matrices are several vectors of the embedding size, one after the other.
    parts = 3 if kind == "fc" else 2 if heads else 1
    width = weights.shape[1] // parts
    for part in range(parts):
        columns = slice(part * shape[1] // parts, part * shape[1] // parts + width)
        result[: weights.shape[0], columns] = weights[:, part * width : (part + 1) * width]
    return result


if __name__ == "__main__":
    main()
