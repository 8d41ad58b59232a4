"""Record the size and hash of files, and quickly check whether a file has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import CancelledError, ModelFileError
from edgespec.model.base import Progress
from edgespec.system.files import sampled_sha256

__all__ = ["FileRecord", "hash_files", "matches_record"]

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A record of a file's content at a point in time.

    Attributes:
        name: File name without its folder.
        size_bytes: Size of the file in bytes.
        sha256: SHA-256 hash of the file.
        sample: SHA-256 hash of a few sampled blocks. See `sampled_sha256`.
    """

    name: str
    size_bytes: int
    sha256: str
    sample: str

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Create a record from a JSON object. Raises KeyError, TypeError or ValueError if it is invalid."""
        name, size = value["name"], value["size_bytes"]
        if not isinstance(name, str) or not isinstance(size, int) or name != os.path.basename(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return cls(name, size, str(value["sha256"]), str(value["sample"]))


def hash_files(paths: Sequence[Path], what: str, progress: Progress | None = None) -> tuple[FileRecord, ...]:
    """Read files completely and return a record of each file's size and SHA-256 hash.

    Args:
        paths: The files.
        what: Description of the task to show with `progress`.
        progress: Reports the fraction of bytes read so far.

    Raises:
        ModelFileError: A file cannot be read.
        CancelledError: `progress` returned False.
    """
    done_bytes, records = 0, []
    with _reading(paths):
        sizes = [path.stat().st_size for path in paths]
        for path, size_bytes in zip(paths, sizes, strict=True):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    done_bytes += len(chunk)
                    if progress and not progress(what, min(1.0, done_bytes / sum(sizes))):
                        raise CancelledError(f"{what} was cancelled")
            records.append(FileRecord(path.name, size_bytes, digest.hexdigest(), sampled_sha256(path)))
    return tuple(records)


def matches_record(path: Path, record: FileRecord) -> bool:
    """Return whether the size and a few blocks of a file match its record.

    Raises:
        ModelFileError: The file cannot be read.
    """
    with _reading([path]):
        return path.stat().st_size == record.size_bytes and sampled_sha256(path) == record.sample


@contextmanager
def _reading(paths: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFileError(
            f"{error.filename or paths[0]} cannot be read: {error.strerror or error}",
            "check the path and its permissions",
            code="model_file_unreadable",
        ) from error
