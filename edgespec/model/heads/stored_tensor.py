"""Describe a tensor in a file and read its data on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ITEM_BYTES", "StoredTensor", "decode_elements"]

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
# Bytes per element for each data type, by safetensors name.
ITEM_BYTES = {**{name: np.dtype(kind).itemsize for name, kind in _DTYPES.items()}, "BF16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The data type and shape of a tensor in a file, and a function that reads its data.

    Attributes:
        dtype: Data type by its safetensors name, such as `BF16`.
        shape: Size of each dimension.
        read: Reads the tensor. BF16 and FP8 are converted to float32. Raises ModelFileError if the file is
            damaged.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]] = field(repr=False, compare=False)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return "F" in self.dtype


def decode_elements(data: bytes | memoryview | NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Decode little-endian `data` into an array [n]. BF16 and FP8 are converted to float32."""
    if dtype == "BF16":
        # NumPy has no BF16, which is the upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _fp8_values()[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, np.dtype(_DTYPES[dtype]).newbyteorder("<"))


@lru_cache(maxsize=1)
def _fp8_values() -> NDArray[np.float32]:
    """Return the value of each byte in the FP8 format E4M3 (arXiv 2209.05433), float32 [256]."""
    magnitudes = np.arange(128)
    exponents, mantissas = magnitudes >> 3, magnitudes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    values = np.where(exponents, normal, np.ldexp(mantissas / 8, -6)).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])
