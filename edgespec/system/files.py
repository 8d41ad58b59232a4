"""edgespec's folders, atomic writes of private files, and formatting of sizes and errors.

`MappedFiles` detects memory-mapped files that were truncated while in use.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, EFBIG, EINVAL, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigurationError, ModelFileError

_MAX_KEY_DOTS = 100
# A model file's hash covers its first MiB and 16 smaller blocks spread over the rest.
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
# Age in seconds at which a temporary file counts as abandoned. Another process may still be writing a younger
# file. The value was chosen to be generous.
_STALE_SECONDS = 3600.0
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_WRITE_REASONS = {
    ENOSPC: "the disk is full",
    EDQUOT: "your disk quota is used up",
    EFBIG: "the file size limit was reached",
}


def _folder(variable: str, default: str) -> Path:
    if text := os.environ.get(variable, "").rstrip("\r\n"):
        path = Path(os.path.expanduser(text))
        if not path.is_absolute():
            raise ConfigurationError(
                f"{variable} is {text!r}, which is not an absolute path",
                f"set it to an absolute path, such as {Path.cwd() / text}, or unset it",
            )
        return path
    return _platform_folder(default, f"HOME or {variable}")


def _platform_folder(default: str, variables: str) -> Path:
    import platformdirs

    path = Path(getattr(platformdirs, default)("edgespec", appauthor=False))
    if not path.is_absolute():
        raise ConfigurationError(
            "cannot determine your home directory, so edgespec does not know where to store its files",
            f"set {variables} to an absolute path",
        )
    return path


def home_folder() -> Path | None:
    """Return the user's home directory, or None if it is unknown, which can happen in containers."""
    path = Path(os.path.expanduser("~"))
    return path if path.is_absolute() else None


def data_folder() -> Path:
    """Return the folder for user data: `$EDGESPEC_DATA_DIR`, or the platform's user data folder.

    Raises:
        ConfigurationError: The path is relative, or the home directory is unknown.
    """
    return _folder("EDGESPEC_DATA_DIR", "user_data_path")


def cache_folder() -> Path:
    """Return the cache folder: `$EDGESPEC_CACHE_DIR`, or the platform's user cache folder.

    Raises:
        ConfigurationError: The path is relative, or the home directory is unknown.
    """
    return _folder("EDGESPEC_CACHE_DIR", "user_cache_path")


def config_folder() -> Path:
    """Return the settings folder: `$EDGESPEC_CONFIG_DIR`, or the platform's user configuration folder.

    Raises:
        ConfigurationError: The path is relative, or the home directory is unknown.
    """
    return _folder("EDGESPEC_CONFIG_DIR", "user_config_path")


def log_folder() -> Path:
    """Return the folder for llama.cpp's log file.

    Raises:
        ConfigurationError: The home directory is unknown.
    """
    return _platform_folder("user_log_path", "HOME or XDG_STATE_HOME")


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can access, or restrict an existing one. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def unwritable_cache() -> str:
    """Return why nothing can be saved in the cache folder, or an empty string if it is writable."""
    try:
        folder = cache_folder()
        make_private_folder(folder)
    except OSError as error:
        return f"{folder} cannot be created: {error_reason(error)}"
    except ConfigurationError as error:
        return error.what
    return "" if os.access(folder, os.W_OK) else f"{folder} is not writable"


def regular_file_bytes(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError for anything else, such as a pipe."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(EINVAL, "the path is not a regular file")
    return status.st_size


def read_regular_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Read a regular file. Pipes and devices are rejected, because reading them could block forever.

    Args:
        path: The file to read.
        max_bytes: Maximum size of the file, or None for no limit.

    Raises:
        OSError: The path is not a regular file, the file is too large, or it cannot be read.
    """
    size_bytes = regular_file_bytes(path)
    if max_bytes is not None and size_bytes > max_bytes:
        raise OSError(
            EINVAL, f"the file has {size_bytes:,} bytes, which exceeds the limit of {max_bytes:,} bytes"
        )
    return path.read_bytes()


@contextmanager
def reading_model_files(path: Path) -> Iterator[None]:
    """Convert errors from reading a model's files to ModelFileErrors.

    Args:
        path: The file or folder, for errors that name no file.
    """
    try:
        yield
    except OSError as error:
        raise ModelFileError(
            f"{error.filename or path} cannot be read: {error_reason(error)}",
            "check the path and its permissions",
            code="model_file_unreadable",
        ) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse untrusted TOML.

    Raises:
        ValueError: The text is not valid TOML, or is nested too deeply.
    """
    # Reject keys with many dots, because tomllib takes quadratic time to parse them.
    if any(part.count(".") > _MAX_KEY_DOTS for part in re.split(r"[\n=,{}\[\]]", text)):
        raise ValueError(f"a key has more than {_MAX_KEY_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise ValueError("a number has too many digits") from error


def write_private_file(path: Path, *payload: bytes) -> None:
    """Write a file that only its owner can read, atomically replacing an older version.

    A missing parent folder is created as a private folder. An existing folder keeps its permissions.
    Temporary files left behind by processes that were killed while writing are deleted.

    Args:
        path: The file to write.
        payload: The parts of the file's contents, in order.

    Raises:
        OSError: The file cannot be written. The older version is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    delete_stale_temporaries(path.parent, path.name)
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


def delete_stale_temporaries(folder: Path, name: str = "") -> None:
    """Delete temporary files left behind by processes that were killed in `write_private_file`.

    Args:
        folder: The folder to clean.
        name: Name of the file whose temporary files to delete. If empty, those of all files are deleted.
    """
    with suppress(OSError):
        for path in folder.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()


@contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` if the block succeeds.

    If the block fails, the temporary file is deleted. Only one process may write to `path` at a time.

    Raises:
        OSError: The temporary file cannot be moved to `path`.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk, if the system supports that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def file_state(path: Path) -> str:
    """Return a file's name, device, inode, size, modification time and change time. Raises OSError.

    Every write changes the result, even if the modification time is reset afterwards, because programs
    cannot set the change time.
    """
    status = path.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return f"{path.name} {' '.join(map(str, numbers))}"


def sampled_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's size, first MiB and 16 blocks spread over the file. Raises OSError.

    The digest changes if the file is truncated or replaced. Sampling is much faster than reading a whole
    model file.
    """
    size_bytes = regular_file_bytes(path)
    digest = hashlib.sha256(b"%d\0" % size_bytes)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for block in range(1, _BLOCKS + 1):
            file.seek(max(0, size_bytes * block // _BLOCKS - _BLOCK_BYTES))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def format_bytes(size_bytes: int) -> str:
    """Format a size in bytes for display, in powers of 1024, such as `900 B` or `1.4 GiB`.

    Memory and file sizes use the same units, because a model file takes up as much memory as disk space.
    """
    size, unit = float(size_bytes), 0
    while size >= 999.5 and unit + 1 < len(_SIZE_UNITS):
        size, unit = size / 1024, unit + 1
    digits = 1 if unit and size < 99.95 else 0
    return f"{size:,.{digits}f} {_SIZE_UNITS[unit]}"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with at least this many significant digits and no exponent for large numbers."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_rate(per_second: float, decimals: int = 0) -> str:
    """Format a speed with two significant digits below 1, one decimal place below 10, and few above.

    Args:
        per_second: The speed.
        decimals: Number of decimal places from 10 on.
    """
    if per_second < 1:
        return f"{per_second:.2g}"
    return f"{per_second:,.{1 if per_second < 10 else decimals}f}"


def error_reason(error: Exception) -> str:
    """Return an error's reason in lower case, such as `the disk is full` or `permission denied`."""
    if isinstance(error, OSError):
        reason = _WRITE_REASONS.get(error.errno or 0, error.strerror or str(error))
    else:
        reason = str(error)
    return (reason or type(error).__name__).lower()


def write_advice(error: OSError, folder: Path, setting: str = "") -> str:
    """Return advice for an error that occurred while writing to a folder.

    Args:
        error: The error that occurred.
        folder: The folder to write to.
        setting: The option or environment variable that chooses another folder, such as `--to` or
            `HF_HUB_CACHE`. Empty if there is none.
    """
    choose = f"use {setting} with" if setting.startswith("-") else f"set {setting} to"
    if error.errno in (ENOSPC, EDQUOT):
        step = (
            f"free some space on the disk that contains {folder}, for example with `edgespec delete-data"
            " prefix-cache`"
        )
    elif error.errno == EFBIG:
        step = "raise the limit with `ulimit -f unlimited` (a FAT32 disk allows at most 4 GiB per file)"
    elif error.errno == EROFS and setting:
        return f"{choose} a writable folder"
    elif error.errno in (EACCES, EPERM, EROFS):
        step = f"make {folder} writable for your user"
    else:
        step = f"check that {folder} is writable and that its disk has free space"
    return f"{step}, or {choose} a folder on another disk" if setting else step


def write_all(handle: int, payload: bytes) -> None:
    """Write all bytes to an open file. Raises OSError.

    A single call to `os.write` can write fewer bytes without raising an error, for example if the disk fills
    up.
    """
    while payload:
        payload = payload[os.write(handle, payload) :]


def delete_files(paths: Iterable[Path]) -> int:
    """Delete files and return the number of bytes freed. Skips missing files. Raises OSError."""
    freed_bytes = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size_bytes = path.stat().st_size
            path.unlink()
            freed_bytes += size_bytes
    return freed_bytes


class MappedFiles:
    """Memory-mapped files and their sizes at load time.

    Reading a page beyond the end of a mapped file kills the process with SIGBUS. Call `check` before each
    pass to detect truncated files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._sizes: dict[Path, tuple[int, int, int]] = {}
        for path in paths:
            with suppress(OSError):
                status = path.stat()
                self._sizes[path] = (status.st_dev, status.st_ino, status.st_size)

    def check(self) -> None:
        """Raise ModelFileError if a file was truncated.

        Deleted and replaced files are safe, because the mapping keeps the old file.
        """
        for path, (device, inode, size) in self._sizes.items():
            try:
                status = path.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (device, inode) and status.st_size < size:
                raise ModelFileError(
                    f"{path} was truncated while it was in use: only {status.st_size:,} of {size:,} bytes"
                    " remain",
                    "restore the file and load the model again",
                )
