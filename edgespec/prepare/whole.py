"""The one file that a model in two halves was, or would be, for as long as something is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.backends.base import Progress
from edgespec.backends.llamacpp import layerskip_files
from edgespec.prepare.gguf_parts import GgufModel, write_model

__all__ = ["merged_file"]


@contextmanager
def merged_file(
    folder: Path, path: Path, progress: Progress | None = None, *, header_only: bool = False
) -> Iterator[Path]:
    """Both halves in `folder` as one model in the file `path`, which is not there afterwards.

    header_only: only what its header says, and no tensors. Raises ModelFileError, OSError and CancelledError.
    """
    lower = GgufModel(
        [
            folder / name
            for name in (layerskip_files.LOWER_FIRST, layerskip_files.SHARED, layerskip_files.LOWER)
        ]
    )
    upper = GgufModel(
        [
            folder / name
            for name in (layerskip_files.UPPER_FIRST, layerskip_files.SHARED, layerskip_files.UPPER)
        ]
    )
    below, above = lower.layer_count, upper.layer_count
    tensors = [*lower.shared(), *lower.layers(0, below), *upper.layers(0, above, first=below)]
    try:
        write_model(
            path, lower.architecture, lower.metadata_with(upper), tensors, progress, header_only=header_only
        )
        yield path
    finally:
        path.unlink(missing_ok=True)
