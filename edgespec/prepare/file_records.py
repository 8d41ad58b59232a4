"""Record the size and hash of files, and quickly check whether a file has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.base import Progress
from edgespec.errors import CancelledError, ModelFileError
from edgespec.files import sampled_sha256

__all__ = ["FileRecord", "hash_files", "matches_record"]

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A record of a file's content at a certain time.

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

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "sample": self.sample,
        }

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Create a record from a JSON object.

        Raises:
            KeyError: A key is missing.
            TypeError: A value has the wrong type.
            ValueError: The name is not a plain file name.
        """
        name, size = value["name"], value["size_bytes"]
        if not isinstance(name, str) or not isinstance(size, int) or name != os.path.basename(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return cls(name, size, str(value["sha256"]), str(value["sample"]))


def hash_files(paths: Sequence[Path], what: str, progress: Progress | None = None) -> tuple[FileRecord, ...]:
    """Read files completely and return their records.

    Args:
        paths: The files.
        what: Description of the task to show with `progress`.
        progress: Reports the fraction of bytes read so far.

    Raises:
        ModelFileError: A file cannot be read.
        CancelledError: `progress` returned False.
    """
    sizes = [_size(path) for path in paths]
    done, total, records = 0, max(1, sum(sizes)), []
    for path, size in zip(paths, sizes, strict=True):
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    done += len(chunk)
                    if progress and not progress(what, min(1.0, done / total)):
                        raise CancelledError(f"{what} was cancelled")
        except OSError as error:
            raise _unreadable(path, error) from error
        records.append(FileRecord(path.name, size, digest.hexdigest(), _sample(path)))
    return tuple(records)


def matches_record(path: Path, record: FileRecord) -> bool:
    """Return whether the size and a few blocks of a file match its record.

    Raises:
        ModelFileError: The file cannot be read.
    """
    return _size(path) == record.size_bytes and _sample(path) == record.sample


def _sample(path: Path) -> str:
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(
        f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions"
    )
