"""Copy models to another quantisation type, to run the copies instead of the originals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.model.base import Progress
from edgespec.store.prepared.builder import BuildFolder, build
from edgespec.store.prepared.prepared_files import check_prepared, find_prepared

__all__ = ["find_quantised", "prepare_quantised"]

_COPY = "copy.gguf"
# Free disk space in bytes that a copy needs in addition to the size of the model. A type with about as many
# bits per weight can produce a slightly larger file.
_EXTRA_BYTES = 16 << 20


def find_quantised(path: Path, type_name: str) -> Path | None:
    """Return the file of a copy made by `prepare_quantised`, or None if it is missing or damaged."""
    prepared = find_prepared("quantised", path, {"type": type_name})
    try:
        if prepared is not None:
            check_prepared(prepared, path)
    except ModelFileError:
        return None
    return prepared.path(_COPY) if prepared is not None else None


def prepare_quantised(path: Path, type_name: str, progress: Progress | None = None) -> Path:
    """Make a copy of a GGUF model in another quantisation type, or return the existing intact copy.

    Args:
        path: The GGUF file.
        type_name: Quantisation type of the copy, such as Q4_0.
        progress: Reports progress while reading and writing.

    Returns:
        The copy's file in the store.

    Raises:
        ModelFileError: The model cannot be read, or the copy cannot be written.
        BackendError: llama.cpp failed.
        CancelledError: `progress` returned False.
    """
    from edgespec.backends.llamacpp.quantise import quantise

    def write_files(build_folder: BuildFolder) -> Mapping[str, Any]:
        build_folder.file(_COPY, lambda copy: quantise(build_folder.source, copy, type_name, progress))
        return {}

    settings = {"type": type_name}
    needed_bytes = path.stat().st_size + _EXTRA_BYTES
    return build("quantised", path, settings, write_files, needed_bytes=needed_bytes, progress=progress).path(
        _COPY
    )
