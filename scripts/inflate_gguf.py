#!/usr/bin/env python3
"""Enlarge a Llama GGUF so that it is as slow as a large model but generates the same tokens.

Small models are not limited by memory bandwidth, so they cannot show the costs and savings of speculation.
This script pads the width, heads, feed-forward layers and depth of a model with weights that do not change
its output. The result has the acceptance rates of the small model and the costs of a large one. It is
stored in F16.

    scripts/inflate_gguf.py models/demo-target-q8_0.gguf big-target.gguf --dim 2048 --ffn 5632 --layers 24
    scripts/inflate_gguf.py models/demo-draft-q8_0.gguf big-draft.gguf --dim 768 --ffn 2048 --layers 6

RMSNorm stays exact: for x' = [x, 0] of width D', the weight w' = w * sqrt(D/D') and eps' = eps * D/D' give
the same normalised values. The output columns of new heads and feed-forward units are zero, and so are the
output projections of new layers.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float16]


class Inflater:
    """Pads the tensors of a Llama model to a larger shape."""

    def __init__(self, reader: gguf.GGUFReader, dim: int, ffn: int, layers: int, seed: int) -> None:
        def field(key: str) -> Any:
            return reader.fields[key].contents()

        if field("general.architecture") != "llama":
            raise SystemExit(
                f"error: the architecture is {field('general.architecture')!r}; only 'llama' is supported"
            )
        self.old_dim, old_ffn = int(field("llama.embedding_length")), int(field("llama.feed_forward_length"))
        old_layers, heads = int(field("llama.block_count")), int(field("llama.attention.head_count"))
        kv_heads = int(field("llama.attention.head_count_kv"))
        if dim % self.old_dim or layers % old_layers or ffn < old_ffn:
            raise SystemExit(
                f"error: --dim must be a multiple of {self.old_dim}, --layers a multiple of {old_layers},"
                f" and --ffn at least {old_ffn}"
            )
        self.dim, self.layers, self.step = dim, layers, layers // old_layers
        head_dim, times = self.old_dim // heads, dim // self.old_dim
        query, key = heads * times * head_dim, kv_heads * times * head_dim
        # The new numbers of rows and columns of each weight, and whether the added rows must be zero.
        self.shapes = {
            "attn_q": (query, dim, False),
            "attn_k": (key, dim, False),
            "attn_v": (key, dim, False),
            "attn_output": (dim, query, True),
            "ffn_gate": (ffn, dim, False),
            "ffn_up": (ffn, dim, False),
            "ffn_down": (dim, ffn, True),
        }
        eps = float(field("llama.attention.layer_norm_rms_epsilon"))
        self.metadata = {
            "llama.embedding_length": dim,
            "llama.feed_forward_length": ffn,
            "llama.block_count": layers,
            "llama.attention.head_count": heads * times,
            "llama.attention.head_count_kv": kv_heads * times,
            "llama.attention.layer_norm_rms_epsilon": eps * self.old_dim / dim,
            "llama.rope.dimension_count": head_dim,
            "llama.attention.key_length": head_dim,
            "llama.attention.value_length": head_dim,
            "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        }
        self._random = np.random.default_rng(seed)

    def block(self, kind: str, weights: NDArray[np.float32] | None) -> NDArray[Any]:
        """Return a layer's padded tensor or, if `weights` is None, that of a new layer without effect."""
        if kind.endswith("_norm"):
            return np.ones(self.dim, np.float32) if weights is None else self.norm(weights)
        rows, columns, zero_rows = self.shapes[kind]
        filler = self._random.standard_normal((rows, columns), dtype=np.float32) * 0.02
        result = np.zeros((rows, columns), np.float16) if zero_rows else filler.astype(np.float16)
        if weights is not None:
            result[: weights.shape[0], :] = 0
            result[: weights.shape[0], : weights.shape[1]] = weights
        return result

    def norm(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the padded weights of an RMSNorm."""
        gains = np.ones(self.dim, np.float32)
        gains[: self.old_dim] = weights * np.sqrt(self.old_dim / self.dim)
        return gains

    def table(self, weights: NDArray[np.float32]) -> Matrix:
        """Return a padded embedding or output matrix."""
        wide = np.zeros((weights.shape[0], self.dim), np.float16)
        wide[:, : self.old_dim] = weights
        return wide


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the GGUF file to enlarge")
    parser.add_argument("result", help="the GGUF file to write")
    parser.add_argument(
        "--dim", type=int, required=True, help="new embedding width, a multiple of the old one"
    )
    parser.add_argument("--ffn", type=int, required=True, help="new feed-forward width")
    parser.add_argument("--layers", type=int, required=True, help="new depth, a multiple of the old one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    reader = gguf.GGUFReader(args.source)
    inflater = Inflater(reader, args.dim, args.ffn, args.layers, args.seed)
    writer = gguf.GGUFWriter(args.result, "llama", use_temp_file=True)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = inflater.metadata.get(key, field.contents())
            writer.add_key_value(
                key, value, field.types[0], sub_type=field.types[1] if len(field.types) > 1 else None
            )
    kinds: dict[str, None] = {}
    for tensor in reader.tensors:
        weights = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match:
            kinds[match[2]] = None
            name = f"blk.{int(match[1]) * inflater.step}.{match[2]}.weight"
            writer.add_tensor(name, inflater.block(match[2], weights))
        elif tensor.name == "output_norm.weight":
            writer.add_tensor(tensor.name, inflater.norm(weights))
        elif tensor.name in ("token_embd.weight", "output.weight"):
            writer.add_tensor(tensor.name, inflater.table(weights))
        else:
            raise SystemExit(f"error: unknown tensor {tensor.name!r}; only plain Llama models are supported")
    for layer in range(inflater.layers):
        for kind in kinds if layer % inflater.step else ():
            writer.add_tensor(f"blk.{layer}.{kind}.weight", inflater.block(kind, None))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


if __name__ == "__main__":
    main()
