"""Find the files of a model that was prepared for early exit."""

from __future__ import annotations

from dataclasses import replace

from edgespec.errors import ModelFileError
from edgespec.store.prepared.prepared_files import check_prepared, find_prepared
from edgespec.store.reference import Resolved

__all__ = ["find_split_model"]


def find_split_model(found: Resolved, *, is_named: bool) -> Resolved:
    """Return the model's files prepared for early exit, or `found` if there are none.

    Args:
        found: The target.
        is_named: Whether the user named the method. If so, damaged or outdated files are an error.

    Raises:
        ModelFileError: The files are damaged or outdated.
    """
    if "layerskip" not in found.file_format.preparations:
        return found
    prepared = find_prepared("layerskip", found.path)
    if prepared is None:
        return found
    try:
        check_prepared(prepared, found.path)
    except ModelFileError:
        if is_named:
            raise
        return found
    return replace(found, path=prepared.folder, note=str(prepared.folder), format=prepared.kind)
