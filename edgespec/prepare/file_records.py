"""What is known of files: their sizes, their hashes, and a cheap look that tells whether they changed."""

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
    """A file as it was: its name in its folder, size and SHA-256.

    sample: see `sampled_sha256`.
    """

    name: str
    size_bytes: int
    sha256: str
    sample: str

    def to_json(self) -> dict[str, Any]:
        """The hash_files as a JSON object."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "sample": self.sample,
        }

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """The record of a JSON object. Raises KeyError, TypeError or ValueError when it is none."""
        name, size = value["name"], value["size_bytes"]
        if not isinstance(name, str) or not isinstance(size, int) or name != os.path.basename(name):
            raise ValueError(f"{name!r} is no file of a folder")
        return cls(name, size, str(value["sha256"]), str(value["sample"]))


def hash_files(paths: Sequence[Path], what: str, progress: Progress | None = None) -> tuple[FileRecord, ...]:
    """The records of these files, read whole. Raises ModelFileError, and CancelledError on `progress`."""
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


def matches_record(path: Path, known: FileRecord) -> bool:
    """Whether the file looks as it did, by its size and a few blocks. Raises ModelFileError."""
    return _size(path) == known.size_bytes and _sample(path) == known.sample


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
    return ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path")
