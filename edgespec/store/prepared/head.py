"""Convert published heads to GGUF, for targets whose backend requires that format."""

from __future__ import annotations

import hashlib
import shlex
from functools import partial
from pathlib import Path

from edgespec.errors import ModelFileError, OptionError
from edgespec.model.formats.head_files import head_at
from edgespec.model.registry import format_at
from edgespec.store.prepared.builder import delete_leftovers, require_folder, write_conversion
from edgespec.system.files import cache_folder, error_reason

__all__ = ["convert_once", "converted_path", "needs_conversion", "prepare_head"]


def converted_path(folder: Path, target: Path) -> Path:
    """Return the cache path for a head's GGUF version, whether or not the file exists.

    The path depends on the size and modification time of the head's files, so that a changed head is
    converted again. Raises ModelFileError if the folder cannot be read.
    """
    try:
        stamps = [
            (file.name, status.st_size, status.st_mtime_ns)
            for file in format_at(folder).files(folder)
            for status in [file.stat()]
        ]
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be read: {error_reason(error)}",
            "check the path and its permissions",
            code="model_file_unreadable",
        ) from error
    key = f"{folder.resolve()} {stamps} {_layer_count(target)}"
    return (
        cache_folder()
        / "heads"
        / f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.gguf"
    )


def needs_conversion(folder: Path, target: Path) -> bool:
    """Return whether a head must be converted for a target. Raises ModelFileError if the head is damaged."""
    return head_at(folder).method in format_at(target).converted_heads


def convert_once(folder: Path, target: Path) -> Path:
    """Return a head's GGUF version, converting it on first use. Raises the same errors as `prepare_head`."""
    path = converted_path(folder, target)
    if not path.exists():
        delete_leftovers(path.parent)
        prepare_head(folder, target, path, setting="EDGESPEC_CACHE_DIR")
    return path


def prepare_head(folder: Path, target: Path, output: Path, *, setting: str = "--to") -> int:
    """Convert a published head, such as EAGLE-3, to a GGUF file.

    Args:
        folder: Folder of the head, as published on Hugging Face.
        target: The GGUF model that the head was trained for.
        output: The file to write. An existing file is replaced once the new one is complete.
        setting: The option or environment variable that determines the output folder, for error messages.

    Returns:
        The size of the new file in bytes.

    Raises:
        ModelNotFoundError: The folder does not exist.
        ModelFileError: The folder contains no head that can be converted.
        OptionError: The target is not a GGUF model.
        EdgespecError: The file cannot be written.
    """
    file_format = format_at(target)
    if not file_format.converted_heads:
        raise OptionError(
            f"{target} is not a GGUF model",
            "pass the GGUF model that the draft head was trained for",
            code="wrong_file",
        )
    require_folder(folder)
    support = file_format.heads.get(head_at(folder).method)
    if support is None or support.convert is None:
        raise ModelFileError(
            f"the draft head in {folder} does not need to be converted, because edgespec can use it as it is",
            f"use the folder itself: --head {shlex.quote(str(folder))}",
            code="wrong_file",
        )
    write = partial(support.convert, folder, _layer_count(target))
    return write_conversion(output, f"the draft head {folder}", write, setting=setting)


def _layer_count(target: Path) -> int:
    return format_at(target).read_info(target).layers
