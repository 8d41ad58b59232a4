"""Describe a tensor in a file and read its data on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ITEM_BYTES", "StoredTensor", "decode_elements"]

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
# Bytes per element for each data type, by safetensors name.
ITEM_BYTES = {**{name: np.dtype(kind).itemsize for name, kind in _DTYPES.items()}, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The data type and shape of a tensor in a file, and a function that reads its data.

    Attributes:
        dtype: Data type by its safetensors name, such as `BF16`.
        shape: Size of each dimension.
        read: Reads the tensor. BF16 is converted to float32. Raises ModelFileError if the file is damaged.
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
    """Decode little-endian `data` into an array [n]. BF16 is converted to float32."""
    if dtype == "BF16":
        # NumPy has no BF16, which is the upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(_DTYPES[dtype]).newbyteorder("<"))
