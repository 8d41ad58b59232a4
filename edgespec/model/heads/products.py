"""Load head weights, and compute matrix products, norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.model.heads.stored_tensor import StoredTensor

__all__ = [
    "Array",
    "MakeProduct",
    "Product",
    "WeightLoader",
    "rms_norm",
    "silu",
]

Array: TypeAlias = NDArray[np.float32]
# Multiplies an array [rows, inputs] by a matrix and returns [rows, outputs].
Product: TypeAlias = Callable[[Array], Array]
# Function that returns the `Product` for a float16 or float32 matrix [outputs, inputs]. The second argument
# is the matrix's data type in the file (see `StoredTensor`), such as BF16. The matrix must be copied, because
# it may be mapped from a file that could change.
MakeProduct: TypeAlias = Callable[[NDArray[np.floating], str], Product]


class WeightLoader:
    """Reads the weights of a head.

    Args:
        file: The file with the weights, for error messages.
        make_product: Creates the function that multiplies by a matrix.
    """

    def __init__(self, file: Path, make_product: MakeProduct) -> None:
        self._file, self._make_product = file, make_product

    def matrix(self, tensor: StoredTensor) -> Product:
        """Return a function that multiplies by a matrix. Raises ModelFileError if a weight is not finite."""
        return self._make_product(self._finite(tensor), tensor.dtype)

    def linear(self, weight: StoredTensor, bias: StoredTensor | None) -> Product:
        """Return a function that multiplies by a matrix and adds a bias, if any. See `matrix`."""
        product = self.matrix(weight)
        if bias is None:
            return product
        added = self.vector(bias)
        return lambda rows: product(rows) + added

    def rows(self, tensor: StoredTensor) -> Callable[[Sequence[int]], Array]:
        """Return a function that looks up rows of a matrix by index, [rows, size].

        16-bit matrices keep their type in memory. Raises ModelFileError if a weight is not finite.
        """
        values = np.array(self._finite(tensor), np.float16 if tensor.dtype == "F16" else np.float32)
        if tensor.dtype != "BF16":
            return lambda ids: values[list(ids)].astype(np.float32)
        # BF16 is the upper half of a float32.
        upper = values.view(np.uint16)[:, 1::2].copy()
        return lambda ids: (upper[list(ids)].astype(np.uint32) << 16).view(np.float32)

    def vector(self, tensor: StoredTensor) -> Array:
        """Return a vector in float32. Raises ModelFileError if a weight is not finite."""
        return self._finite(tensor).astype(np.float32)

    def _finite(self, tensor: StoredTensor) -> NDArray[np.floating]:
        values = tensor.read()
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFileError(
                f"the head {self._file} is damaged: its weights are not finite numbers",
                "download it again, or use --head none",
            )
        return values


def silu(x: Array) -> Array:
    """Return `x * sigmoid(x)`, computed with tanh so that large values do not overflow."""
    y: Array = x * (0.5 + 0.5 * np.tanh(0.5 * x))
    return y


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Scale each row to a root mean square of 1, then multiply by `weight`."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight
    return y
