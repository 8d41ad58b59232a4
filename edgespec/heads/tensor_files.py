"""Read tensors from safetensors and PyTorch files."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.files import error_reason, regular_file_bytes
from edgespec.heads.fp8_weights import dequantise_fp8
from edgespec.heads.pickled_tensors import read_pickled_tensors
from edgespec.heads.stored_tensor import ITEM_BYTES, StoredTensor, decode_elements

__all__ = ["read_folder_tensors", "read_tensor_files"]

# File name patterns of weights. Only files that match the first successful pattern are read, because some
# publishers upload the same weights in both formats.
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder by name. The weights can be split into multiple files.

    Raises:
        ModelFileError: The folder contains no weights, or a file is missing, damaged or truncated.
    """
    for pattern in _PATTERNS:
        if tensors := read_tensor_files(*sorted(folder.glob(pattern))):
            return tensors
    raise ModelFileError(
        f"{folder} contains no weights (*.safetensors or pytorch_model*.bin)", "download the head again"
    )


def read_tensor_files(*paths: Path) -> dict[str, StoredTensor]:
    """Return the tensors in safetensors or PyTorch files by name. FP8 weights are dequantised.

    Raises:
        ModelFileError: A file is missing, damaged or truncated.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        tensors |= _read_file(path)
    return dequantise_fp8(tensors)


def _read_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix != ".safetensors":
        return read_pickled_tensors(path)
    from gguf.utility import SafetensorsLocal  # Imported lazily because importing gguf takes 0.2 seconds.

    try:
        file_bytes = regular_file_bytes(path)
        return {name: _stored(path, one, file_bytes) for name, one in SafetensorsLocal(path).tensors.items()}
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error_reason(error)}", "download it again") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ModelFileError(
            f"{path} is damaged or truncated: {shorten(error)}", "download it again"
        ) from error


def _stored(path: Path, tensor: Any, file_bytes: int) -> StoredTensor:
    """Return the metadata of a safetensors tensor. Raises ValueError if its data is incomplete."""
    start, size_bytes = tensor.data_range.offset, tensor.data_range.size
    if tensor.dtype not in ITEM_BYTES:
        raise ModelFileError(
            f"{path} contains tensors of type {shorten(tensor.dtype)}, which edgespec cannot read",
            "use a version of the head with 16-bit weights",
        )
    if not all(type(size) is int and size >= 0 for size in (start, size_bytes, *tensor.shape)):
        raise ValueError("the shape or position of a tensor is not given in whole numbers")
    if size_bytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] or start + size_bytes > file_bytes:
        raise ValueError(f"the data of a tensor of shape {list(tensor.shape)} is incomplete")
    return StoredTensor(tensor.dtype, tensor.shape, partial(_read, path, tensor))


def _read(path: Path, tensor: Any) -> NDArray[Any]:
    try:
        return decode_elements(tensor.mmap_bytes(), tensor.dtype).reshape(tensor.shape)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error_reason(error)}", "download it again") from error
