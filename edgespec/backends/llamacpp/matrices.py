"""Read weight matrices from GGUF files, and multiply with them in ggml, llama.cpp's tensor library.

llama.cpp's API does not expose the matrices. ggml computes directly on 16-bit and quantised weights. NumPy
would need them in float32, which takes two to eight times the memory. It would also be slower by about the
same factor, because these products are limited by memory bandwidth (see `scripts/bench_head_products.py`).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ContextParams, ggml
from edgespec.errors import BackendError, CapabilityError, ModelFileError, OutOfMemoryError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufTensor, read_header
from edgespec.model.heads.numpy_layers import Array, Product
from edgespec.system.files import format_bytes

__all__ = ["FileMatrix", "GgmlProducts", "product_bytes"]

_CPU = 0
_KINDS = {"F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
# Bytes of memory for the metadata of a graph and its tensors, which take a few hundred bytes each.
_DESCRIPTION_BYTES = 1 << 14
# Maximum number of nodes in a graph. A product needs only one.
_GRAPH_NODES = 4


def product_bytes(dtype: str) -> int:
    """Return how many bytes per weight `GgmlProducts.product` needs for a matrix of this data type."""
    return 2 if dtype in _KINDS else 4


class GgmlProducts:
    """Factory for functions that multiply by a matrix, using ggml on the CPU.

    The functions share a buffer for their results, so only one of them runs at a time.

    Args:
        threads: Returns the number of CPU threads to use for the next product.
        layout: Address of the ggml buffer type that stores the matrices. None leaves them as they are in the
            file.
    """

    def __init__(self, threads: Callable[[], int], layout: int | None = None) -> None:
        self._lib, self._threads, self._lock = ggml(), threads, threading.Lock()
        self._backend = self._lib.ggml_backend_init_by_type(_CPU, None)
        weakref.finalize(self, self._lib.ggml_backend_free, self._backend)
        plain = self._lib.ggml_backend_get_default_buffer_type(self._backend)
        self._layout = layout or plain
        self._allocator = self._lib.ggml_gallocr_new(plain)
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
        buffer = self._lib.ggml_backend_alloc_ctx_tensors_from_buft(context, self._layout)
        if not buffer:
            self._lib.ggml_free(context)
            raise OutOfMemoryError(
                "there is not enough memory for one of the draft head's matrices"
                f" ({format_bytes(data.nbytes)})",
                "close other programs, or use --head none",
            )
        self._lib.ggml_backend_tensor_set(matrix, data.ctypes.data, 0, data.nbytes)
        product = _Product(self, matrix, outputs)
        weakref.finalize(product, self._lib.ggml_free, context)
        weakref.finalize(product, self._lib.ggml_backend_buffer_free, buffer)
        return product

    def multiply(self, matrix: int, outputs: int, rows: Array) -> Array:
        """Multiply an array [rows, inputs] by a matrix in ggml's memory, and return [rows, outputs]."""
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
                raise OutOfMemoryError(
                    "there is not enough memory to run the draft head",
                    "close other programs, or use --head none",
                )
            lib.ggml_backend_tensor_set(given, rows.ctypes.data, 0, rows.nbytes)
            if lib.ggml_backend_graph_compute(self._backend, graph):
                raise BackendError("ggml could not run the draft head", "use --head none")
            lib.ggml_backend_tensor_get(product, result.ctypes.data, 0, result.nbytes)
        finally:
            lib.ggml_free(context)
        return result

    def _described(self) -> int:
        """Create a ggml context for tensor metadata, without memory for tensor data."""
        context: int = self._lib.ggml_init(ContextParams(_DESCRIPTION_BYTES, None, True))
        return context


class _Product:
    """Multiplies by a matrix, and frees the matrix when garbage-collected."""

    def __init__(self, products: GgmlProducts, matrix: int, outputs: int) -> None:
        self._products, self._matrix, self._outputs = products, matrix, outputs

    def __call__(self, rows: Array) -> Array:
        return self._products.multiply(self._matrix, self._outputs, rows)


class FileMatrix:
    """A matrix in the files of a GGUF model. A vector is a matrix with one row.

    Args:
        path: The model's GGUF file.
        *names: Tensor names to try. The first one that exists is used.

    Raises:
        ModelFileError: A file cannot be read, or contains no matrix with one of these names.

    Attributes:
        shape: Number of rows and number of columns.
        kind: Type of the weights.
    """

    def __init__(self, path: Path, *names: str) -> None:
        self._file, self._offset_bytes, tensor = _find(path, names)
        size = tensor.shape[0]
        self.shape = tensor.elements // size, size
        self.kind = gguf.GGMLQuantizationType(tensor.kind)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        self._row_bytes = size // block_size * block_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of the matrix in the file, in bytes."""
        return self.shape[0] * self._row_bytes

    def stored(self) -> NDArray[np.uint8]:
        """Return the matrix as stored in the file, uint8 [rows, bytes per row].

        Raises:
            ModelFileError: The file was truncated or has become unreadable.
        """
        return self._read([(0, self.shape[0])])

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the rows with these indices, dequantised to float32 [rows, columns].

        Raises:
            ModelFileError: The file was truncated or has become unreadable.
            CapabilityError: The gguf package cannot dequantise matrices of this type.
        """
        try:
            found: NDArray[np.float32] = gguf.dequantize(self._read([(row, 1) for row in ids]), self.kind)
        except NotImplementedError as error:
            raise CapabilityError(
                f"a matrix in {self._file} has type {self.kind.name}, which edgespec cannot convert",
                "choose another quantisation of the model, or another method, such as suffix",
            ) from error
        return found

    def _read(self, ranges: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
        """Return the rows in the given (first row, row count) ranges, uint8 [rows, bytes per row]."""
        try:
            with self._file.open("rb") as file:
                parts = [self._read_range(file, *each) for each in ranges]
        except OSError as error:
            raise ModelFileError(
                f"{self._file} cannot be read: {error.strerror or error}",
                "download it again",
                code="model_file_unreadable",
            ) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_range(self, file: BinaryIO, start: int, count: int) -> NDArray[np.uint8]:
        file.seek(self._offset_bytes + start * self._row_bytes)
        data = file.read(count * self._row_bytes)
        if len(data) < count * self._row_bytes:
            raise OSError("the file is truncated")
        return np.frombuffer(data, np.uint8).reshape(count, self._row_bytes)


def _find(path: Path, names: Sequence[str]) -> tuple[Path, int, GgufTensor]:
    """Return the file that contains the matrix, the matrix's offset in bytes, and its header entry."""
    headers = {part: read_header(part) for part in gguf_files(path)}
    for name in names:
        for part, header in headers.items():
            for tensor in header.tensors:
                if tensor.name == name and len(tensor.shape) in (1, 2) and tensor.elements:
                    return part, header.size_bytes + tensor.offset_bytes, tensor
    raise ModelFileError(f"{path} contains no tensor {names[0]}", "choose another GGUF file of the model")
