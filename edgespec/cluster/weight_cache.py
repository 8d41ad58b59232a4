"""A bounded folder of weights that a worker received, so that loading a model again sends less data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import WorkerError
from edgespec.files import error_reason, make_private_folder, write_advice

__all__ = ["WeightCache"]


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
            # llama.cpp writes and reads the files. Not all file systems record the time of the last access.
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
