"""edgespec's own folders, atomic writing of private files, and formatting of sizes and errors."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EINVAL, ENOSPC
from pathlib import Path

__all__ = [
    "DISK_FULL",
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

# Error numbers of a full disk and of a user's used-up share of it.
DISK_FULL = (ENOSPC, EDQUOT)
# Amounts read by `sampled_sha256`: the start of the file, then blocks spread evenly over the rest.
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _folder(variable: str, default: str) -> Path:
    """Return the folder given by an environment variable, or the platform's default."""
    # A value read from a file may end with a newline.
    if text := os.environ.get(variable, "").rstrip("\r\n"):
        return Path(text).expanduser()
    import platformdirs

    return Path(getattr(platformdirs, default)("edgespec", appauthor=False))


def data_folder() -> Path:
    """Return the folder for user data: `$EDGESPEC_DATA_DIR`, or the platform's user data folder."""
    return _folder("EDGESPEC_DATA_DIR", "user_data_path")


def cache_folder() -> Path:
    """Return the cache folder: `$EDGESPEC_CACHE_DIR`, or the platform's user cache folder."""
    return _folder("EDGESPEC_CACHE_DIR", "user_cache_path")


def config_folder() -> Path:
    """Return the settings folder: `$EDGESPEC_CONFIG_DIR`, or the platform's user configuration folder."""
    return _folder("EDGESPEC_CONFIG_DIR", "user_config_path")


def log_folder() -> Path:
    """Return the folder for llama.cpp's log file."""
    from platformdirs import user_log_path

    return user_log_path("edgespec", appauthor=False)


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can access, or restrict an existing one. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def regular_file_bytes(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError for anything else, such as a pipe."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(EINVAL, "the path is not a regular file")
    return status.st_size


def read_regular_file(path: Path) -> bytes:
    """Read a regular file. Raises OSError for pipes and devices, which could block forever."""
    regular_file_bytes(path)
    return path.read_bytes()


def write_private_file(path: Path, *payload: bytes) -> None:
    """Write a file that only its owner can read, atomically replacing an older version.

    A missing parent folder is created as a private folder; an existing one keeps its permissions. Temporary
    files left behind by earlier, killed writes of this file are deleted.

    Args:
        path: The file to write.
        payload: The parts of its contents, in order.

    Raises:
        OSError: The file cannot be written. The older version is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    delete_stale_temporaries(path.parent, path.name)
    # mkstemp creates a file that only its owner can read, and os.replace keeps its permissions.
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
    """Create an empty private file, or set the modification time of an existing one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)


def delete_stale_temporaries(folder: Path, name: str = "", older_seconds: float = 3600.0) -> None:
    """Delete temporary files left behind in a folder when `write_private_file` was killed.

    Args:
        folder: The folder to clean.
        name: Delete only temporary files for the file with this name. If empty, delete those for all files.
        older_seconds: Keep files newer than this, because another process may still be writing them.
    """
    with suppress(OSError):
        for path in folder.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - older_seconds:
                    path.unlink()


@contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. If the block succeeds, rename that file to `path`.

    Allows only one writer at once. If the block fails, the temporary file remains until the next write.
    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    sync_to_disk(temporary)
    temporary.replace(path)


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk if the system supports it."""
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
    """Return the SHA-256 of a file's size, its first MiB and 16 blocks spread over the file. Raises OSError.

    The digest changes if the file is truncated or replaced. Sampling is much faster than reading a whole
    model file.
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
    """Format a size in bytes for display, in powers of 1024, such as `900 B` or `1.4 GiB`.

    File sizes use the same units as memory, because a model file takes up as much memory as disk space.
    """
    size, unit = float(size_bytes), 0
    while size >= 999.5 and unit + 1 < len(_SIZE_UNITS):
        size, unit = size / 1024, unit + 1
    digits = 1 if unit and size < 99.95 else 0
    return f"{size:,.{digits}f} {_SIZE_UNITS[unit]}"


def error_reason(error: Exception) -> str:
    """Return the reason for an error in lower case, such as `permission denied`."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return "the disk is full"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return (reason or type(error).__name__).lower()


def delete_files(paths: Iterable[Path]) -> int:
    """Delete files and return the number of bytes freed. Skips missing files. Raises OSError."""
    freed_bytes = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size_bytes = path.stat().st_size
            path.unlink()
            freed_bytes += size_bytes
    return freed_bytes
