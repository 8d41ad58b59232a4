"""Files that are mapped into memory: their pages are read when they are needed, as long as they are there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgespec.errors import ModelFileError

__all__ = ["MappedFiles"]


class MappedFiles:
    """Files as they are now. One that is cut short would end the process with the next pass that reads it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._sizes: dict[Path, tuple[int, int, int]] = {}
        for path in paths:
            with suppress(OSError):
                status = path.stat()
                self._sizes[path] = (status.st_dev, status.st_ino, status.st_size)

    def check(self) -> None:
        """Raises ModelFileError where one was cut short. It takes a microsecond for each.

        A file that was deleted, or took the name of one, does no harm: what is mapped stays.
        """
        for path, (device, number, size) in self._sizes.items():
            try:
                status = path.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (device, number) and status.st_size < size:
                raise ModelFileError(
                    f"{path} was cut short while it is in use: {status.st_size:,} of {size:,} bytes are left",
                    "put the file back and load the model again",
                )
