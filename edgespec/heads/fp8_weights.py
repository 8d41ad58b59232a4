"""Dequantise FP8 weights, in which DeepSeek-V3 and other models are published."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.heads.stored_tensor import StoredTensor

__all__ = ["dequantise_fp8"]

# Suffixes that turn the name of a weight into the name of its scales. The product of the two is the
# dequantised weight.
_SUFFIXES = ("_scale_inv", "_scale")
# Rows and columns that share a scale. All published models with scales per block use this size, which mlx-lm
# assumes too.
_BLOCK = 128


def dequantise_fp8(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `stored` with FP8 weights dequantised and their scales removed.

    A weight [..., rows, columns] has one scale for all elements, one for each row, or one for each block of
    128 x 128 elements. The products are rounded to BF16, like the weights that mlx-lm dequantises. FP8
    weights without scales, or with scales of another shape, stay as they are.
    """
    tensors = dict(stored)
    for name, weight in stored.items():
        if weight.dtype != "F8_E4M3":
            continue
        for suffix in _SUFFIXES:
            scales = stored.get(name + suffix)
            if scales is not None and (_is_broadcast(weight, scales) or _is_per_block(weight, scales)):
                tensors[name] = StoredTensor("BF16", weight.shape, partial(_product, weight, scales))
                del tensors[name + suffix]
                break
    return tensors


def _is_broadcast(weight: StoredTensor, scales: StoredTensor) -> bool:
    """Return whether there is one scale for all elements or one for each row."""
    return scales.shape in ((), (1,), (*weight.shape[:-1], 1))


def _is_per_block(weight: StoredTensor, scales: StoredTensor) -> bool:
    blocks = tuple(-(-size // _BLOCK) for size in weight.shape[-2:])
    return len(blocks) == 2 and scales.shape == (*weight.shape[:-2], *blocks)


def _product(weight: StoredTensor, scales: StoredTensor) -> NDArray[Any]:
    elements, factors = weight.read(), scales.read().astype(np.float32)
    if not _is_broadcast(weight, scales):
        rows, columns = weight.shape[-2:]
        factors = factors.repeat(_BLOCK, axis=-2)[..., :rows, :].repeat(_BLOCK, axis=-1)[..., :columns]
    return _rounded_to_bf16(elements * factors)


def _rounded_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 values to the nearest values of BF16, which is the upper half of a float32."""
    bits = values.view(np.uint32)
    last = (bits >> 16) & 1  # Ties round to even.
    return ((bits + 0x7FFF + last) & np.uint32(0xFFFF0000)).view(np.float32)
