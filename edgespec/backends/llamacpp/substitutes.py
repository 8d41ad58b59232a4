"""Turn a streamed target into a draft model by replacing its streamed blocks with low-bit copies in memory.

This is SubSpec (arXiv 2509.18344). The draft model shares all other weights with the target: they have the
same addresses in both models, so they are in memory only once.

llama.cpp cannot build a model from another model's weights. Instead, it loads a sparse file with the draft
model's header but no weights. The file takes up no memory once its mapping has been replaced. Then, the data
pointer of each tensor is set to the target's weights, or the low-bit copy is loaded at the tensor's address.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.backends.llamacpp.loading import load_files
from edgespec.backends.llamacpp.native import ggml, library
from edgespec.backends.llamacpp.weight_stream import (
    FEED_FORWARD,
    file_mappings,
    forget_peak_memory,
    replace_mapping,
)
from edgespec.errors import BackendError, CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufTensor, read_header, write_header
from edgespec.system.disks import stores_holes
from edgespec.system.files import cache_folder, error_reason, make_private_folder, write_advice

__all__ = ["load_substituted", "loaded_bytes", "substitute_bytes"]

# `llama_model::get_tensor(char const*) const`, which llama.cpp exports but does not declare in `llama.h`.
_GET_TENSOR = "_ZNK11llama_model10get_tensorEPKc"
# Number of bytes of a `ggml_tensor` to search for its data pointer. The whole structure is 336 bytes.
_TENSOR_BYTES = 320
_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the draft model, and the offset of its low-bit copy in the file, if it has one."""

    tensor: GgufTensor
    offset_bytes: int | None


def substitute_bytes(file: Path) -> dict[int, int]:
    """Return the size in bytes of each layer's low-bit copies in a file.

    Raises ModelFileError if the file is unreadable or damaged.
    """
    sizes: dict[int, int] = {}
    for tensor in read_header(file).tensors:
        if match := FEED_FORWARD.fullmatch(tensor.name):
            layer = int(match[1])
            sizes[layer] = sizes.get(layer, 0) + _bytes_of(tensor)
    return sizes


def loaded_bytes(file: Path, layers: Sequence[int]) -> int:
    """Return the total size in bytes of the low-bit copies of `layers`.

    Raises ModelFileError if the file is unreadable or damaged.
    """
    sizes = substitute_bytes(file)
    return sum(sizes.get(layer, 0) for layer in layers)


def load_substituted(
    target: Any, path: str, file: Path, layers: Sequence[int], name: str, options: LoadOptions
) -> Any:
    """Load the draft model of a streamed target.

    Args:
        target: The target's llama_model handle. It must stay loaded while the draft model is in use.
        path: The target's file, or its first file if there are several.
        file: A GGUF file with low-bit copies of feed-forward weights.
        layers: The layers that the target streams.
        name: Name of the draft model, for messages.
        options: The target's load options.

    Returns:
        A llama_model handle, which the caller must free.

    Raises:
        CapabilityError: A layer has no low-bit copy, or this llama.cpp cannot share weights.
        BackendError: The low-bit copies or the temporary file cannot be read or written.
        ModelFileError: A file is damaged.
    """
    files = gguf_files(Path(path))
    sources = _sources(files, file, frozenset(layers))
    try:
        make_private_folder(cache_folder())
        with TemporaryDirectory(dir=cache_folder()) as folder:
            sparse = Path(folder) / "model.gguf"
            write_header(sparse, files[0], [source.tensor for source in sources], _data_bytes(sources))
            if stores_holes(sparse):
                raise CapabilityError(
                    f"low-bit copies need a cache folder on a disk, but {cache_folder()} is kept in memory",
                    "set EDGESPEC_CACHE_DIR to a folder on a disk, or use another method, such as suffix",
                    code="lowbit_not_supported",
                )
            before = file_mappings([sparse])
            # Disable repacking, because a repacked tensor is not a copy of its data in the file.
            mapped = replace(options, mmap=True, mlock=False, repack=False, own_head=False)
            weights = load_files(str(sparse), name, mapped, None)
            mappings = sorted(file_mappings([sparse]) - before)
    except OSError as error:
        raise BackendError(
            f"a temporary file for {name} cannot be written: {error_reason(error)}",
            write_advice(error, cache_folder(), "EDGESPEC_CACHE_DIR"),
            code="file_not_written",
        ) from error
    try:
        for _, _, begin, end in mappings:
            replace_mapping(begin, end)
        forget_peak_memory()
        _fill(weights, target, sources, file)
    except BaseException:
        library().llama_model_free(weights)
        raise
    return weights


def _sources(files: Sequence[Path], file: Path, layers: frozenset[int]) -> list[_Source]:
    """Return the draft model's tensors in file order, with their offsets in the draft model's file."""
    header = read_header(file)
    copies = {tensor.name: tensor for tensor in header.tensors}
    alignment = int(read_header(files[0]).metadata.get("general.alignment", 32))
    sources, offset = [], 0
    for own in (tensor for part in files for tensor in read_header(part).tensors):
        match = FEED_FORWARD.fullmatch(own.name)
        kind, copy_offset = own.kind, None
        if match and int(match[1]) in layers:
            copy = copies.get(own.name)
            if copy is None or copy.shape != own.shape:
                raise CapabilityError(
                    f"{file} does not contain a low-bit copy of {own.name}",
                    "make the copies again with `edgespec prepare lowbit --for-memory`",
                    code="lowbit_not_supported",
                )
            kind, copy_offset = copy.kind, header.size_bytes + copy.offset_bytes
        tensor = GgufTensor(own.name, own.shape, kind, offset)
        sources.append(_Source(tensor, copy_offset))
        offset += -(-_bytes_of(tensor) // alignment) * alignment
    return sources


def _data_bytes(sources: Sequence[_Source]) -> int:
    last = sources[-1].tensor
    return last.offset_bytes + _bytes_of(last)


def _bytes_of(tensor: GgufTensor) -> int:
    row_bytes: int = ggml().ggml_row_size(tensor.kind, tensor.shape[0])
    return row_bytes * math.prod(tensor.shape[1:])


def _fill(weights: Any, target: Any, sources: Sequence[_Source], file: Path) -> None:
    """Share the target's weights with the draft model, and load the low-bit copies."""
    get_tensor, backend = _tensor_getter(), ggml()
    with file.open("rb", buffering=0) as copies:
        for source in sources:
            name = source.tensor.name.encode()
            own, shared = get_tensor(weights, name), get_tensor(target, name)
            if not own and not shared:
                continue  # llama.cpp does not load layers for multi-token prediction.
            if not own or not shared or backend.ggml_nbytes(own) != _bytes_of(source.tensor):
                raise _cannot_share(f"it does not load {source.tensor.name} as expected")
            if source.offset_bytes is None:
                _set_data(own, backend.ggml_get_data(shared))
            else:
                _read(copies, source.offset_bytes, backend.ggml_get_data(own), _bytes_of(source.tensor), file)
        with suppress(OSError):
            # The copies are now in memory, so drop the file from the page cache.
            os.posix_fadvise(copies.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Any, offset: int, address: int, size_bytes: int, path: Path) -> None:
    done = 0
    reason = "the file is too short"
    try:
        while done < size_bytes:
            buffer = (ctypes.c_char * (size_bytes - done)).from_address(address + done)
            count = os.preadv(file.fileno(), [buffer], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        reason = error_reason(error)
    if done < size_bytes:
        raise BackendError(
            f"the low-bit copies in {path} cannot be read: {reason}",
            "make them again with `edgespec prepare lowbit --for-memory`",
            code="model_file_unreadable",
        )


def _set_data(tensor: int, address: int) -> None:
    """Set the data pointer of a tensor.

    ggml has no function for this. The pointer is therefore located by its value, and then read back with
    `ggml_get_data` to detect a different structure layout.
    """
    get_data = ggml().ggml_get_data
    before = get_data(tensor)
    fields = (ctypes.c_size_t * (_TENSOR_BYTES // _POINTER_BYTES)).from_address(tensor)
    places = [index for index, value in enumerate(fields) if value == before]
    if len(places) != 1:
        raise _cannot_share("its tensors have an unknown layout")
    fields[places[0]] = address
    if get_data(tensor) != address:
        fields[places[0]] = before
        raise _cannot_share("its tensors have an unknown layout")


def _tensor_getter() -> Any:
    from llama_cpp.llama_cpp import _lib as libllama

    try:
        function = getattr(libllama, _GET_TENSOR)
    except AttributeError:
        raise _cannot_share("it does not give access to its tensors") from None
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    return function


def _cannot_share(reason: str) -> CapabilityError:
    return CapabilityError(
        f"the installed llama.cpp cannot share weights between models: {reason}",
        "use another method, such as suffix, or install the version that edgespec was tested with",
        code="lowbit_not_supported",
    )
