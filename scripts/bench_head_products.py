#!/usr/bin/env python3
"""Measure how fast ggml and NumPy multiply by a head's output matrix, which takes most of a head's time.

    scripts/bench_head_products.py --sizes 4096x32000 --threads 2

Each cell is the median time in milliseconds. A chain needs one row per draft token, and each level of a tree
needs several.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from gguf import GGMLQuantizationType

from edgespec.backends.llamacpp.matrices import GgmlProducts
from edgespec.backends.llamacpp.native import ggml
from edgespec.model.heads.numpy_layers import Array, Product

_SECONDS, _MIN_RUNS = 0.7, 3
_HEADER = ("matrix", "rows", "NumPy F32", "ggml F32", "ggml F16", "ggml BF16", "ggml Q8_0")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="2048x32000,4096x32000,2048x128256,4096x128256", help="hidden size x vocabulary"
    )
    parser.add_argument("--rows", default="1,4", help="numbers of rows")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    random, products = np.random.default_rng(0), GgmlProducts(lambda: args.threads)
    print(f"| {' | '.join(_HEADER)} |\n|{' --- |' * len(_HEADER)}")
    for size in args.sizes.split(","):
        inputs, outputs = map(int, size.split("x"))
        matrix = random.random((outputs, inputs), np.float32) - np.float32(0.5)
        columns: dict[str, Product] = {
            "NumPy F32": _numpy_product(matrix),
            **{f"ggml {dtype}": products.product(matrix, dtype) for dtype in ("F32", "F16", "BF16")},
            "ggml Q8_0": _quantised(products, matrix),
        }
        for count in map(int, args.rows.split(",")):
            rows = random.standard_normal((count, inputs)).astype(np.float32)
            times = [f"{_milliseconds(product, rows):.1f}" for product in columns.values()]
            print("|", " | ".join([size, str(count), *times]), "|", flush=True)


def _numpy_product(matrix: Array) -> Product:
    transposed = matrix.T
    return lambda rows: rows @ transposed


def _quantised(products: GgmlProducts, matrix: Array) -> Product:
    outputs, inputs = matrix.shape
    kind = GGMLQuantizationType.Q8_0
    stored = np.empty((outputs, inputs // 32 * 34), np.uint8)
    ggml().ggml_quantize_chunk(kind, matrix.ctypes.data, stored.ctypes.data, 0, outputs, inputs, None)
    return products.stored_product(stored, kind, outputs, inputs)


def _milliseconds(product: Product, rows: Array) -> float:
    product(rows)
    times: list[float] = []
    while sum(times) < _SECONDS or len(times) < _MIN_RUNS:
        start = time.perf_counter()
        product(rows)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


if __name__ == "__main__":
    main()
