"""Find out whether files can be written to a folder, and how much space it has."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EIO
from pathlib import Path

from edgespec.system.files import write_all

__all__ = ["append_error", "explain_write_errors", "free_bytes", "write_error"]

# Number of bytes written to test a folder. Some file systems can store tiny files even on a full disk.
_TRIAL_BYTES = 1 << 16


def write_error(folder: Path) -> OSError | None:
    """Write, flush and delete a small private file to find out whether files can be stored in a folder.

    If the folder does not exist, the file is written to its nearest existing parent.

    Returns:
        The error, or None if the file was written.
    """
    try:
        with tempfile.TemporaryFile(dir=_existing(folder), prefix=".edgespec-", buffering=0) as file:
            _write_trial(file.fileno())
    except OSError as error:
        return error
    return None


def append_error(path: Path) -> OSError | None:
    """Append to a file to find out why a library failed to write to it. Return the error, or None."""
    try:
        with path.open("ab", buffering=0) as file:
            _write_trial(file.fileno())
    except OSError as error:
        return error
    return None


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Add the missing reason to NumPy's write errors in the block.

    Args:
        path: The file that the block writes.

    Raises:
        OSError: The block failed to write the file.
    """
    try:
        yield
    except OSError as error:
        # NumPy does not report the reason, so write to the file again to find out.
        if error.errno is None:
            raise append_error(path) or OSError(EIO, "only part of the file was written") from error
        raise


def _write_trial(handle: int) -> None:
    # Write random bytes, because some file systems store zeros without using disk space.
    write_all(handle, os.urandom(_TRIAL_BYTES))
    os.fsync(handle)


def free_bytes(folder: Path) -> int:
    """Return the free disk space for a folder in bytes. The folder may not exist yet. Raises OSError."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent folder that exists."""
    return next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
