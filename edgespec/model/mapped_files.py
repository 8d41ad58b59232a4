"""Detect memory-mapped model files that were truncated while in use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgespec.errors import ModelFileError

__all__ = ["MappedFiles"]


class MappedFiles:
    """Memory-mapped files and their sizes at load time.

    Reading a page beyond the end of a mapped file kills the process with SIGBUS. Call `check` before a pass
    to detect a truncated file.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._sizes: dict[Path, tuple[int, int, int]] = {}
        for path in paths:
            with suppress(OSError):
                status = path.stat()
                self._sizes[path] = (status.st_dev, status.st_ino, status.st_size)

    def check(self) -> None:
        """Raise ModelFileError if a file was truncated.

        Deleted and replaced files are safe, because the mapping keeps the old file.
        """
        for path, (device, inode, size) in self._sizes.items():
            try:
                status = path.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (device, inode) and status.st_size < size:
                raise ModelFileError(
                    f"{path} was truncated while in use: only {status.st_size:,} of {size:,} bytes remain",
                    "restore the file and load the model again",
                )
