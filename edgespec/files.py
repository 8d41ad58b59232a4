"""The folders edgespec keeps its own files in, and files that are written in one step: whole or not there."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL
from pathlib import Path

__all__ = [
    "cache_folder",
    "config_folder",
    "data_folder",
    "delete_files",
    "delete_stale_temporaries",
    "error_reason",
    "format_bytes",
    "log_folder",
    "make_private_folder",
    "read_regular_file",
    "regular_file_bytes",
    "replace_when_written",
    "sampled_sha256",
    "sync_to_disk",
    "touch_private",
    "write_private_file",
]

_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _chosen(variable: str) -> Path | None:
    """The folder that a variable names; a line end after it was never meant."""
    text = os.environ.get(variable, "").rstrip("\r\n")
    return Path(text).expanduser() if text else None


def data_folder() -> Path:
    """Where edgespec keeps what a user made: `$EDGESPEC_DATA_DIR`, or the platform's user data folder."""
    if chosen := _chosen("EDGESPEC_DATA_DIR"):
        return chosen
    from platformdirs import user_data_path

    return user_data_path("edgespec", appauthor=False)


def cache_folder() -> Path:
    """Where edgespec keeps what it can make again: `$EDGESPEC_CACHE_DIR`, or the platform's cache folder."""
    if chosen := _chosen("EDGESPEC_CACHE_DIR"):
        return chosen
    from platformdirs import user_cache_path

    return user_cache_path("edgespec", appauthor=False)


def config_folder() -> Path:
    """Where a user's settings are: `$EDGESPEC_CONFIG_DIR`, or the platform's user configuration folder."""
    if chosen := _chosen("EDGESPEC_CONFIG_DIR"):
        return chosen
    from platformdirs import user_config_path

    return user_config_path("edgespec", appauthor=False)


def log_folder() -> Path:
    """Where the log of llama.cpp is."""
    from platformdirs import user_log_path

    return user_log_path("edgespec", appauthor=False)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, or make it such a one. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def regular_file_bytes(path: Path) -> int:
    """The size of a file. Raises OSError, also for a pipe, a device or a folder."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(EINVAL, "it is not a regular file")
    return status.st_size


def read_regular_file(path: Path) -> bytes:
    """What is in a file. Raises OSError, also for a pipe or a device: it may have no end."""
    regular_file_bytes(path)
    return path.read_bytes()


def write_private_file(path: Path, *payload: bytes) -> None:
    """Put `payload`, part after part, where older content may be, for its owner's eyes only. Raises OSError.

    A folder that has to be made for it is private, too; one that is there is left as it is. What was left
    half written of this file long ago is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    delete_stale_temporaries(path.parent, path.name)
    # mkstemp makes the file readable by its owner only, and os.replace keeps that.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def touch_private(path: Path) -> None:
    """Make an empty private file, or give one that is there the time of now. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)


def delete_stale_temporaries(folder: Path, name: str = "", older_seconds: float = 3600.0) -> None:
    """Delete what `write_private_file` left half written in a folder when its process was killed, long ago.

    name: of one file, not of all.
    """
    with suppress(OSError):
        for path in folder.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - older_seconds:
                    path.unlink()


@contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when the block ends well. Raises OSError.

    One writer at a time: what a block that failed has written stays until the next one.
    """
    growing = path.with_name(f"{path.name}.tmp")
    yield growing
    sync_to_disk(growing)
    growing.replace(path)


def sync_to_disk(path: Path) -> None:
    """Make sure the disk has a file or folder; folders cannot be asked everywhere."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def sampled_sha256(path: Path) -> str:
    """The SHA-256 of a file's size, its first megabyte and a few blocks spread over the rest. Raises OSError.

    A file that is cut, replaced or written over nearly always has another, and it is had without reading
    the whole.
    """
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(b"%d\0" % size_bytes)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for block in range(1, _BLOCKS + 1):
            file.seek(max(0, size_bytes * block // _BLOCKS - _BLOCK_BYTES))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def format_bytes(size_bytes: int) -> str:
    """Bytes for people, in powers of 1024: 900 B, 1.4 GiB, 118 MiB.

    Files and memory are written alike: what a file takes on disk is what its weights take in memory.
    """
    size, unit = float(size_bytes), 0
    while size >= 999.5 and unit + 1 < len(_SIZE_UNITS):
        size, unit = size / 1024, unit + 1
    digits = 1 if unit and size < 99.95 else 0
    return f"{size:,.{digits}f} {_SIZE_UNITS[unit]}"


def error_reason(error: Exception) -> str:
    """What the system said, in its words."""
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or type(error).__name__).lower()


def delete_files(paths: Iterable[Path]) -> int:
    """Delete files. Gives the bytes that were freed. Raises OSError."""
    freed_bytes = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size_bytes = path.stat().st_size
            path.unlink()
            freed_bytes += size_bytes
    return freed_bytes
