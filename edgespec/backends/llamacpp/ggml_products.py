"""Compute matrix products with ggml, llama.cpp's tensor library.

ggml computes directly on 16-bit and quantised weights. NumPy would need them in float32, which takes two to
eight times the memory. It would also be slower by about the same factor, because these products are limited
by memory bandwidth (see `scripts/bench_head_products.py`).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ContextParams, ggml
from edgespec.errors import BackendError, OutOfMemoryError
from edgespec.model.heads.products import Array, Product
from edgespec.system.files import format_bytes

__all__ = ["GgmlProducts", "product_bytes"]

_CPU = 0
_KINDS = {"F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
# Memory in bytes for the descriptions of a graph and its tensors, which have a few hundred bytes each.
_DESCRIPTION_BYTES = 1 << 14
# Maximum number of nodes in a graph. A product needs only one.
_GRAPH_NODES = 4


def product_bytes(dtype: str) -> int:
    """Return how many bytes per weight `GgmlProducts.product` needs for a matrix of this data type."""
    return 2 if dtype in _KINDS else 4


class GgmlProducts:
    """Factory for functions that multiply by a matrix with ggml on the CPU.

    The functions share a buffer for their results, so only one of them runs at a time.

    Args:
        threads: Returns the number of CPU threads to use for the next product.
    """

    def __init__(self, threads: Callable[[], int]) -> None:
        self._lib, self._threads, self._lock = ggml(), threads, threading.Lock()
        self._backend = self._lib.ggml_backend_init_by_type(_CPU, None)
        weakref.finalize(self, self._lib.ggml_backend_free, self._backend)
        self._allocator = self._lib.ggml_gallocr_new(
            self._lib.ggml_backend_get_default_buffer_type(self._backend)
        )
        weakref.finalize(self, self._lib.ggml_gallocr_free, self._allocator)
        device = self._lib.ggml_backend_get_device(self._backend)
        # Look up the function through ggml, because ctypes cannot find the symbol if llama.cpp loads the CPU
        # library at run time.
        address = self._lib.ggml_backend_reg_get_proc_address(
            self._lib.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads"
        )
        self._set_threads = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)

    def product(self, matrix: NDArray[np.floating], dtype: str) -> Product:
        """Return a function that multiplies by a matrix. See `MakeProduct`.

        float16 and BF16 matrices keep their type. All others are converted to float32.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """
        values = np.asarray(matrix, np.float16 if dtype == "F16" else np.float32)
        if dtype == "BF16":
            # BF16 is the upper half of a float32.
            values = np.ascontiguousarray(values).view(np.uint16)[:, 1::2]
        return self.stored_product(values, _KINDS.get(dtype, GGMLQuantizationType.F32), *matrix.shape)

    def stored_product(
        self, data: NDArray[Any], kind: GGMLQuantizationType, outputs: int, inputs: int
    ) -> Product:
        """Return a function that multiplies by a matrix of any GGUF tensor type.

        Args:
            data: The matrix as stored in a GGUF file. It is copied.
            kind: Type of the weights.
            outputs: Number of rows of the matrix.
            inputs: Number of columns of the matrix.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """
        data = np.ascontiguousarray(data)
        context = self._described()
        matrix = self._lib.ggml_new_tensor_2d(context, kind, inputs, outputs)
        buffer = self._lib.ggml_backend_alloc_ctx_tensors(context, self._backend)
        if not buffer:
            self._lib.ggml_free(context)
            raise OutOfMemoryError(
                f"not enough memory for a head's matrix of {format_bytes(data.nbytes)}",
                "close other programs, or use --head none",
            )
        self._lib.ggml_backend_tensor_set(matrix, data.ctypes.data, 0, data.nbytes)
        product = _Product(self, matrix, outputs)
        weakref.finalize(product, self._lib.ggml_free, context)
        weakref.finalize(product, self._lib.ggml_backend_buffer_free, buffer)
        return product

    def multiply(self, matrix: int, outputs: int, rows: Array) -> Array:
        """Multiply an array [rows, inputs] by a matrix in ggml's memory. Return [rows, outputs]."""
        with self._lock:
            return self._multiply(matrix, outputs, np.ascontiguousarray(rows, np.float32))

    def _multiply(self, matrix: int, outputs: int, rows: Array) -> Array:
        lib = self._lib
        result = np.empty((len(rows), outputs), np.float32)
        context = self._described()
        try:
            given = lib.ggml_new_tensor_2d(context, GGMLQuantizationType.F32, *rows.shape[::-1])
            lib.ggml_set_input(given)
            product = lib.ggml_mul_mat(context, matrix, given)
            lib.ggml_set_output(product)
            graph = lib.ggml_new_graph_custom(context, _GRAPH_NODES, False)
            lib.ggml_build_forward_expand(graph, product)
            self._set_threads(self._backend, self._threads())
            if not lib.ggml_gallocr_alloc_graph(self._allocator, graph):
                raise OutOfMemoryError("not enough memory to run a head", "close other programs")
            lib.ggml_backend_tensor_set(given, rows.ctypes.data, 0, rows.nbytes)
            if lib.ggml_backend_graph_compute(self._backend, graph):
                raise BackendError("ggml could not run a head", "use --head none")
            lib.ggml_backend_tensor_get(product, result.ctypes.data, 0, result.nbytes)
        finally:
            lib.ggml_free(context)
        return result

    def _described(self) -> int:
        """Create a ggml context that describes tensors without holding their data."""
        context: int = self._lib.ggml_init(ContextParams(_DESCRIPTION_BYTES, None, True))
        return context


class _Product:
    """Multiplies by a matrix, and frees the matrix when garbage-collected."""

    def __init__(self, products: GgmlProducts, matrix: int, outputs: int) -> None:
        self._products, self._matrix, self._outputs = products, matrix, outputs

    def __call__(self, rows: Array) -> Array:
        return self._products.multiply(self._matrix, self._outputs, rows)
