"""Read weight matrices directly from GGUF files, because llama.cpp's API does not expose them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufTensor, read_header

__all__ = ["FileMatrix"]


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
            CapabilityError: The gguf package cannot dequantise the type of the matrix.
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
