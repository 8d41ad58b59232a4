"""A copy of a GGUF model with fewer bits, to draft with on the model's own keys and values (QSpec)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import Progress
from edgespec.errors import ModelFileError, OptionError
from edgespec.files import error_reason
from edgespec.prepare.builder import BuildFolder, make
from edgespec.prepare.store import (
    PreparedModel,
    absolute_path,
    check_prepared,
    find_prepared,
    model_files,
    read_prepared,
)

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.quantise import QuantisedSize

__all__ = [
    "DEFAULT_TYPE",
    "check_lowbit",
    "find_lowbit",
    "find_valid_lowbit",
    "lowbit_file",
    "prepare_lowbit",
]

DEFAULT_TYPE = "Q4_0"
_COPY = "copy.gguf"
# What halves are put together in.
_WHOLE = "whole.gguf"
# The weights' bytes are known to a hundredth of a megabyte; vocabulary and names come on top of them.
_HEADER_BYTES = 1 << 20


def prepare_lowbit(
    path: Path, type_name: str = DEFAULT_TYPE, *, to: Path | None = None, progress: Progress | None = None
) -> PreparedModel:
    """Make a copy of the model at `path` with weights of a type, such as Q4_0, or return the one there is.

    path: a GGUF file, or a folder that was prepared for early exit. Then the copy is made from the file that
    this was made from, or, where that is gone, from both halves, which are put together for so long.
    to: the folder to make; by default one in the store. The facts of what is returned: `type`,
    `source_weight_bytes`, `weight_bytes`, `saved_bytes`.
    Raises OptionError (no such type, or one that is not smaller than the model is), CapabilityError (a
    type that needs an importance matrix, or a model whose memory is a state), ModelFileError (a file that
    cannot be read, too small a disk), BackendError and CancelledError; after any of them there is no copy.
    """
    from edgespec.backends.llamacpp.lowbit import check_can_share_cache
    from edgespec.backends.llamacpp.quantise import parse_quantisation_type, quantise

    type_name = parse_quantisation_type(type_name)
    if path.is_dir():
        there = find_lowbit(path, type_name)
        if to is None and there is not None and _is_right(there, path):
            return there
        halves = read_prepared(path)
        check_prepared(halves)
        if _is_right(halves, halves.source):
            path = halves.source
    source_bytes = sum(part.stat().st_size for part in model_files(path))
    if not path.is_dir():
        check_can_share_cache(path)
    size = _size(path, type_name)
    facts: Mapping[str, Any] = {
        "type": type_name,
        "source_weight_bytes": size.source_bytes,
        "weight_bytes": size.copy_bytes,
        "saved_bytes": size.source_bytes - size.copy_bytes,
    }

    def write(bench: BuildFolder) -> Mapping[str, Any]:
        def copy(growing: Path) -> None:
            with _whole(bench.source, bench.folder, progress) as whole:
                quantise(whole, growing, type_name, progress)

        bench.file(_COPY, copy, progress)
        return facts

    # The header is written as it is in the source.
    header_bytes = max(0, source_bytes - size.source_bytes) + _HEADER_BYTES
    joined_bytes = source_bytes if path.is_dir() else 0
    return make(
        "lowbit",
        path,
        {"type": type_name},
        write,
        needed_bytes=size.copy_bytes + header_bytes + joined_bytes,
        to=to,
        progress=progress,
    )


def _size(path: Path, type_name: str) -> QuantisedSize:
    """What a copy will take. Raises what `prepare_lowbit` does where it should not be made."""
    from edgespec.backends.llamacpp.quantise import importance_matrix_error, quantised_size

    try:
        with TemporaryDirectory() as folder, _whole(path, Path(folder), header_only=True) as header_only:
            size = quantised_size(header_only, type_name)
    except OSError as error:
        raise ModelFileError(
            f"the header of {path} cannot be written: {error_reason(error)}", "make room for temporary files"
        ) from error
    if size.needs_importance_matrix:
        raise importance_matrix_error(type_name)
    if size.copy_bytes >= size.source_bytes:
        raise OptionError(
            f"a {type_name} copy would take {size.copy_bytes:,} bytes,"
            f" and the model itself takes {size.source_bytes:,}",
            "choose another method: this model has few bits already"
            if type_name == "Q2_K"
            else "choose a type with fewer bits, such as Q2_K",
        )
    return size


def _whole(
    source: Path, folder: Path, progress: Progress | None = None, *, header_only: bool = False
) -> AbstractContextManager[Path]:
    """The model as a GGUF file: its own, or one in `folder` that halves are put together in."""
    if not source.is_dir():
        return nullcontext(source)
    from edgespec.prepare.whole import merged_file

    return merged_file(source, folder / _WHOLE, progress, header_only=header_only)


def _is_right(prepared: PreparedModel, source: Path) -> bool:
    """Whether neither what was prepared nor the model it was made from has changed, and both are there."""
    try:
        check_lowbit(prepared, source)
    except ModelFileError:
        return False
    return True


def find_lowbit(path: Path, type_name: str | None = None) -> PreparedModel | None:
    """The copy made of the model at `path`: of a type, or for None the one made last.

    Of a model that was prepared for early exit it may have been made from the same file as that was.
    Whether it is still right is not looked at: see `check_lowbit`.
    """
    settings = None
    if type_name is not None:
        from edgespec.backends.llamacpp.quantise import parse_quantisation_type

        settings = {"type": parse_quantisation_type(type_name)}
    found = find_prepared("lowbit", path, settings)
    if found is None and path.is_dir():
        halves = read_prepared(path)
        found = find_prepared("lowbit", halves.source, settings)
        if found is not None and found.source_records != halves.source_records:
            return None
    return found


def check_lowbit(prepared: PreparedModel, path: Path) -> None:
    """Raises ModelFileError when the copy is damaged, or the model at `path` is not what it was made from."""
    check_prepared(prepared, path if prepared.source == absolute_path(path) else None)


def find_valid_lowbit(path: Path) -> PreparedModel | None:
    """`find_lowbit` where nobody asked for it: what is damaged or stale counts as not there."""
    prepared = find_lowbit(path)
    return prepared if prepared and _is_right(prepared, path) else None


def lowbit_file(prepared: PreparedModel) -> Path:
    """The file of the copy, for `LowBit(copy=...)`."""
    return prepared.path(_COPY)
