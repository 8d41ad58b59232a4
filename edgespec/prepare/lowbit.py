"""A copy of a GGUF model with fewer bits, to draft with on the model's own keys and values (QSpec)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.backends.base import Progress
from edgespec.backends.gguf_files import gguf_files
from edgespec.errors import OptionError
from edgespec.prepare.making import Workbench, make
from edgespec.prepare.store import Prepared, find

__all__ = ["DEFAULT_TYPE", "copy_path", "find_lowbit", "prepare_lowbit"]

DEFAULT_TYPE = "Q4_0"
_COPY = "copy.gguf"
# The weights' bytes are known to a hundredth of a megabyte; vocabulary and names come on top of them.
_HEADER_BYTES = 1 << 20


def prepare_lowbit(
    path: Path, type_name: str = DEFAULT_TYPE, *, to: Path | None = None, progress: Progress | None = None
) -> Prepared:
    """Make a copy of the model at `path` with weights of a type, such as Q4_0, or return the one there is.

    to: the folder to make; by default one in the store. The facts of what is returned: `type`,
    `source_weight_bytes`, `weight_bytes`, `saved_bytes`.
    Raises OptionError (no such type, or one that is not smaller than the model is), CapabilityError (a
    type that needs an importance matrix, or a model whose memory is a state), ModelFileError (a file that
    cannot be read, too small a disk), BackendError and CancelledError; after any of them there is no copy.
    """
    from edgespec.backends.llamacpp.lowbit import check_lends
    from edgespec.backends.llamacpp.quantise import file_type, needs_matrix, quantise, quantised_size

    type_name = file_type(type_name)
    source_bytes = sum(part.stat().st_size for part in gguf_files(path))
    check_lends(path)
    size = quantised_size(path, type_name)
    if size.needs_matrix:
        raise needs_matrix(type_name)
    if size.copy_bytes >= size.source_bytes:
        raise OptionError(
            f"a {type_name} copy would take {size.copy_bytes:,} bytes,"
            f" and the model itself takes {size.source_bytes:,}",
            "choose another method: this model has few bits already"
            if type_name == "Q2_K"
            else "choose a type with fewer bits, such as Q2_K",
        )
    facts: Mapping[str, Any] = {
        "type": type_name,
        "source_weight_bytes": size.source_bytes,
        "weight_bytes": size.copy_bytes,
        "saved_bytes": size.source_bytes - size.copy_bytes,
    }

    def write(bench: Workbench) -> Mapping[str, Any]:
        bench.file(_COPY, lambda growing: quantise(bench.source, growing, type_name, progress), progress)
        return facts

    # The header is written as it is in the source.
    header_bytes = max(0, source_bytes - size.source_bytes) + _HEADER_BYTES
    return make(
        "lowbit",
        path,
        {"type": type_name},
        write,
        needed_bytes=size.copy_bytes + header_bytes,
        to=to,
        progress=progress,
    )


def find_lowbit(path: Path, type_name: str | None = None) -> Prepared | None:
    """The copy made of the model at `path`: of a type, or for None the one made last.

    Whether it is still right is not looked at: see `edgespec.prepare.store.check`.
    """
    if type_name is None:
        return find("lowbit", path)
    from edgespec.backends.llamacpp.quantise import file_type

    return find("lowbit", path, {"type": file_type(type_name)})


def copy_path(prepared: Prepared) -> Path:
    """The file of the copy, for `LowBit(copy=...)`."""
    return prepared.path(_COPY)
