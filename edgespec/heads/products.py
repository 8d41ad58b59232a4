"""Load the matrices and vectors of heads, and compute with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.heads.stored_tensor import StoredTensor

__all__ = [
    "NUMPY_BYTES_PER_WEIGHT",
    "Array",
    "MakeProduct",
    "Product",
    "WeightLoader",
    "numpy_product",
    "rms_norm",
    "silu",
]

Array: TypeAlias = NDArray[np.float32]
# Function that multiplies rows [rows, inputs] by a matrix, and returns rows [rows, outputs].
Product: TypeAlias = Callable[[Array], Array]
# Function that returns the product with a float16 or float32 matrix [outputs, inputs], given also the name of
# its data type in the file (see `StoredTensor`), which can be BF16.
MakeProduct: TypeAlias = Callable[[NDArray[np.floating], str], Product]


# Memory of a weight of `numpy_product`, in bytes.
NUMPY_BYTES_PER_WEIGHT = 4


def numpy_product(matrix: NDArray[np.floating], _dtype: str = "") -> Product:
    """Return the product with a matrix, computed by NumPy in float32.

    The matrix is copied, because it may be mapped from a file that could change. NumPy has no fast product of
    float16 matrices, so these are converted and then take twice the memory.
    """
    transposed = np.array(matrix, np.float32).T
    return lambda rows: rows @ transposed


class WeightLoader:
    """Reads the weights of a head.

    Args:
        file: The file with the weights, for errors.
        make_product: How to multiply by matrices.
    """

    def __init__(self, file: Path, make_product: MakeProduct) -> None:
        self._file, self._make_product = file, make_product

    def matrix(self, tensor: StoredTensor) -> Product:
        """Return the product with a matrix. Raises ModelFileError if a weight is not a finite number."""
        return self._make_product(self._finite(tensor), tensor.dtype)

    def vector(self, tensor: StoredTensor) -> Array:
        """Return a vector. Raises ModelFileError if a weight is not a finite number."""
        return self._finite(tensor).astype(np.float32)

    def _finite(self, tensor: StoredTensor) -> NDArray[np.floating]:
        values = tensor.read()
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFileError(
                f"the head {self._file} is damaged: its weights are not finite numbers",
                "download it again, or omit --head",
            )
        return values


def silu(x: Array) -> Array:
    """Return `x * sigmoid(x)`, computed such that large numbers do not overflow."""
    y: Array = x * (0.5 + 0.5 * np.tanh(0.5 * x))
    return y


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return rows scaled to a root mean square of 1, and then by `weight`."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight
    return y
