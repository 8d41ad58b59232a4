"""Keep two processes from training in the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.errors import BusyError

__all__ = ["LOCK_FILE", "lock_training"]

LOCK_FILE = "lock"


@contextmanager
def lock_training(path: Path) -> Iterator[None]:
    """Lock the folder of an unfinished training run until the end of the block.

    The operating system releases the lock when the process exits, even if it is killed.

    Args:
        path: The folder. Created if it does not exist. On exit, it and its parent folder are deleted if
            empty.

    Raises:
        BusyError: Another process is training in this folder.
        OSError: The folder cannot be written.
    """
    from filelock import FileLock, Timeout

    path.mkdir(parents=True, exist_ok=True)
    file = path / LOCK_FILE
    lock = FileLock(file, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(
            f"another `edgespec train` is training in {path}",
            "wait until it finishes, stop it with Ctrl-C, or choose another folder with --to",
        ) from None
    try:
        yield
    finally:
        # Delete the file before the lock is released. A process that opened the deleted file cannot lock it.
        file.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):
            path.rmdir()
            path.parent.rmdir()
