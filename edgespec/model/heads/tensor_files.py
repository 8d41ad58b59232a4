"""Read tensors from safetensors and PyTorch files, and dequantise FP8 weights such as DeepSeek's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.model.heads.pickled_tensors import read_pickled_tensors
from edgespec.model.heads.stored_tensor import ITEM_BYTES, StoredTensor, decode_elements
from edgespec.system.files import error_reason, regular_file_bytes

__all__ = ["read_folder_tensors", "read_tensor_files"]

# File name patterns of weights. Only the first pattern that matches any file is used, because some publishers
# upload the same weights in both formats.
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Suffixes that turn the name of a weight into the name of its scales. The product of the two is the
# dequantised weight.
_SUFFIXES = ("_scale_inv", "_scale")
# Rows and columns that share a scale. All published models with scales per block use this size, which mlx-lm
# assumes too.
_BLOCK = 128


def read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder by name. The weights can be split into multiple files.

    Raises:
        ModelFileError: The folder contains no weights, or a file is missing, damaged or truncated.
    """
    for pattern in _PATTERNS:
        if tensors := read_tensor_files(*sorted(folder.glob(pattern))):
            return tensors
    raise ModelFileError(
        f"{folder} contains no weights (*.safetensors or pytorch_model*.bin)",
        "download the head again",
        code="model_file_incomplete",
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
        raise ModelFileError(
            f"{path} cannot be read: {error_reason(error)}", "download it again", code="model_file_unreadable"
        ) from error
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
            code="model_file_not_supported",
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
        raise ModelFileError(
            f"{path} cannot be read: {error_reason(error)}", "download it again", code="model_file_unreadable"
        ) from error


def dequantise_fp8(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `stored` with FP8 weights dequantised and their scales removed.

    A weight [..., rows, columns] has one scale overall, one per row, or one per block of 128 x 128 elements.
    The products are rounded to BF16, as in mlx-lm. FP8 weights without scales, or with scales of another
    shape, are left unchanged.
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
    """Return whether there is one scale overall or one per row."""
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
    """Round float32 values to the nearest BF16 values. BF16 is the upper half of a float32."""
    bits = values.view(np.uint32)
    last = (bits >> 16) & 1  # Ties round to even.
    return ((bits + 0x7FFF + last) & np.uint32(0xFFFF0000)).view(np.float32)
