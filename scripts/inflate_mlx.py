#!/usr/bin/env python3
"""Enlarge a Llama model in MLX format so that it is as slow as a large model but generates similar replies.

This does for MLX models what `inflate_gguf.py`, which explains why, does for GGUF models. The weights are
quantised
again, so near-ties between tokens can swap.

    scripts/inflate_mlx.py models/demo-mlx big-mlx --dim 2048 --ffn 5632 --layers 12
    scripts/inflate_mlx.py models/demo-mlx-draft big-mlx-draft --dim 768 --ffn 2048 --layers 2
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

# The weights whose added rows can be arbitrary, because later weights multiply them by zero.
_FREE_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the model folder to enlarge")
    parser.add_argument("result", type=Path, help="the folder to write")
    parser.add_argument(
        "--dim", type=int, required=True, help="new embedding width, a multiple of the old one"
    )
    parser.add_argument("--ffn", type=int, required=True, help="new feed-forward width")
    parser.add_argument("--layers", type=int, required=True, help="new depth, a multiple of the old one")
    args = parser.parse_args()

    model, config = load_model(args.source)
    old_dim, old_ffn, old_layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    if config["model_type"] != "llama" or "quantization" not in config:
        raise SystemExit("error: only quantised Llama models are supported")
    if args.dim % old_dim or args.layers % old_layers or args.ffn < old_ffn:
        raise SystemExit(
            f"error: --dim must be a multiple of {old_dim}, --layers a multiple of {old_layers},"
            f" and --ffn at least {old_ffn}"
        )
    times, step = args.dim // old_dim, args.layers // old_layers
    new = {
        "hidden_size": args.dim,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": config["num_attention_heads"] * times,
        "num_key_value_heads": config["num_key_value_heads"] * times,
        "rms_norm_eps": config["rms_norm_eps"] / times,
    }
    args.result.mkdir(exist_ok=True)
    for file in args.source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, args.result)
    (args.result / "config.json").write_text(json.dumps(config | new, indent=2))
    bits = config["quantization"]
    weights: dict[str, mx.array] = {}

    def add(name: str, weight: mx.array | None, shape: tuple[int, ...]) -> None:
        """Add a padded weight or, if `weight` is None, that of a new layer without effect."""
        kind = name.split(".")[-2]
        if len(shape) == 1:
            norm = mx.ones(shape)
            if weight is not None:
                norm[: weight.shape[0]] = weight / math.sqrt(times)
            weights[name] = norm
            return
        padded = mx.random.normal(shape) * 0.02 if kind in _FREE_ROWS else mx.zeros(shape)
        if weight is not None:
            padded[: weight.shape[0]] = 0
            padded[: weight.shape[0], : weight.shape[1]] = weight
        parts = mx.quantize(padded, bits["group_size"], bits["bits"])
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[name.replace("weight", part)] = array
        mx.eval(parts)

    for name, weight in sorted(_dense(model)):
        shape = _padded_shape(name, weight, args.dim, args.ffn, times)
        prefix, _, rest = name.partition("layers.")
        if not rest:
            add(name, weight, shape)
            continue
        layer, _, path = rest.partition(".")
        for offset in range(step):
            place = f"{prefix}layers.{int(layer) * step + offset}.{path}"
            add(place, None if offset else weight, shape)
    mx.save_safetensors(str(args.result / "model.safetensors"), weights, {"format": "mlx"})


def _dense(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(dequantize_model(model).parameters())
    return [(name, weight.astype(mx.float32)) for name, weight in flat]


def _padded_shape(name: str, weight: mx.array, dim: int, ffn: int, times: int) -> tuple[int, ...]:
    kind = name.split(".")[-2]
    if weight.ndim == 1:
        return (dim,)
    if kind in ("gate_proj", "up_proj"):
        return (ffn, dim)
    if kind == "down_proj":
        return (dim, ffn)
    if kind in ("embed_tokens", "lm_head"):
        return (weight.shape[0], dim)
    # The attention weights grow with the number of heads.
    return weight.shape[0] * times, weight.shape[1] * times


if __name__ == "__main__":
    main()
