"""A bounded folder of weights that a worker received, so that loading a model again sends less data."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.cluster.messages import Buffer
from edgespec.errors import WorkerError
from edgespec.files import error_reason, make_private_folder, write_advice, write_private_file

__all__ = ["WeightCache", "read_weight", "weight_digest", "write_weight"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WeightCache:
    """A folder for received weights. Its size can exceed `max_bytes` until the next call of `prepare`."""

    folder: Path
    max_bytes: int

    def prepare(self) -> Path:
        """Create the folder, delete the files that were unused for longest, and return the folder.

        Raises:
            WorkerError: The folder cannot be written to.
        """
        try:
            make_private_folder(self.folder)
            files = [(path, path.stat()) for path in self.folder.iterdir() if path.is_file()]
            # llama.cpp reads its files itself. Not all file systems record the time of the last access.
            files.sort(key=lambda file: max(file[1].st_atime, file[1].st_mtime))
            total = sum(state.st_size for _, state in files)
            for path, state in files:
                if total <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= state.st_size
        except OSError as error:
            raise WorkerError(
                f"the weight cache {self.folder} cannot be used: {error_reason(error)}",
                write_advice(error, self.folder),
            ) from error
        return self.folder


def weight_digest(data: Buffer) -> str:
    """Return the name of a weight in the cache."""
    return hashlib.sha256(data).hexdigest()


def read_weight(folder: Path, digest: str) -> bytes | None:
    """Return a weight of an MLX model from the cache's folder, or None if the folder does not contain it.

    Raises:
        ValueError: The digest is not one of `weight_digest`.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not the digest of a weight")
    path = _path(folder, digest)
    with suppress(OSError):
        data = path.read_bytes()
        if weight_digest(data) == digest:
            # `WeightCache.prepare` deletes the files that were unused for longest.
            path.touch()
            return data
    return None


def write_weight(folder: Path, data: Buffer) -> None:
    """Add a weight to the cache's folder. Has no effect if the file cannot be written."""
    with suppress(OSError):
        write_private_file(_path(folder, weight_digest(data)), bytes(data))


def _path(folder: Path, digest: str) -> Path:
    return folder / f"mlx-{digest}"
