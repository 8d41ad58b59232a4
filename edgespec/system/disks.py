"""Determine whether a folder is writable, how much free space it has, and how fast its disk is."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EIO
from pathlib import Path
from time import perf_counter as now

from edgespec.system.files import write_all

# Size in bytes of the test file. It must not be tiny, because some file systems can store tiny files on a
# full disk.
_TRIAL_BYTES = 1 << 16
PARALLEL_READS, READ_BYTES = 8, 2 << 20
"""Number of parallel reads and the size of each, chosen to reach a disk's full speed. On a virtual disk,
eight reads of 2 MiB reached 1.4 GB/s, four of them 1.2 to 1.3 GB/s, and two of 4 MiB 1.1 GB/s.
"""
# Time limit for a measurement in seconds, chosen so that the wait is not noticeable.
_READ_SECONDS = 0.3
# Size in bytes of the temporary file for measuring the read speed of a folder's disk.
_MEASURED_BYTES = 32 << 20
# Size in bytes of the blocks that `os.stat` counts.
_BLOCK_BYTES = 512
# Linux's names of network file systems. Those in user space have the prefix `fuse.`.
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "lustre", "nfs", "nfs4", "rclone", "smb3",
        "smbfs", "sshfs",
    }
)  # fmt: skip


def write_error(folder: Path) -> OSError | None:
    """Test whether files can be stored in a folder by writing, flushing and deleting a small private file.

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
    """Add the reason, which NumPy omits, to errors raised while the block writes a file.

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
    """Return the free disk space in bytes for a folder that may not exist yet. Raises OSError."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent folder that exists."""
    return next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)


def open_uncached(path: Path) -> int:
    """Open a file for reading, bypassing the page cache if the file system allows it. Raises OSError.

    Reading a large file through the page cache would evict the files of other programs. Call `drop_cached`
    after each read, in case the cache could not be bypassed.
    """
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            # Some file systems accept `O_DIRECT` when opening a file, but then fail to read it.
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(file, [page], 0)
            return file
        except OSError:
            os.close(file)
    return os.open(path, os.O_RDONLY)


def drop_cached(file: int, offset: int, size_bytes: int) -> None:
    """Remove part of a file from the page cache if `open_uncached` could not bypass the cache for it.

    Args:
        file: The file descriptor that `open_uncached` returned.
        offset: Start of the part in bytes.
        size_bytes: Size of the part in bytes.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    from fcntl import F_GETFL, fcntl

    if not fcntl(file, F_GETFL) & getattr(os, "O_DIRECT", 0):
        with suppress(OSError):
            os.posix_fadvise(file, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def is_sparse(path: Path) -> bool:
    """Return whether most of a file consists of holes, which take up no disk space. Raises OSError."""
    status = path.stat()
    # Windows does not report the number of blocks.
    return getattr(status, "st_blocks", status.st_size) * _BLOCK_BYTES < status.st_size // 2


def stores_holes(path: Path) -> bool:
    """Return whether reading a mapped hole allocates storage for it, as in memory file systems (tmpfs).

    Args:
        path: A file that ends with a hole.

    Raises:
        OSError: The file cannot be mapped.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        at = status.st_size // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if at == status.st_size:
            at -= mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(file.fileno(), status.st_size - at, access=mmap.ACCESS_READ, offset=at) as end:
            end[-1]
            return os.fstat(file.fileno()).st_blocks > status.st_blocks


def network_drive(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the network file system that holds a file or folder, or "" if there is none.

    Args:
        path: The file or folder, which may not exist yet.
        mounts: Linux's list of mounted file systems. On other systems, network drives are not recognised.
    """
    with suppress(OSError):
        # Paths may contain bytes that are not text, and unusual line breaks.
        lines = mounts.read_bytes().split(b"\n")
        device = _existing(path).stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}".encode()
        for line in lines:
            place, _, kind = line.partition(b" - ")
            if place.split()[2:3] == [number]:
                name = kind.split()[0].decode(errors="replace").removeprefix("fuse.")
                return name if name in _NETWORK_FILE_SYSTEMS else ""
    return ""


def largest_file(files: Sequence[Path]) -> Path:
    """Return the largest of a model's files, for measuring its disk. Raises OSError.

    Measuring with a small file is unreliable, and the first of a model's files may contain only the metadata.
    """
    return max(files, key=lambda file: file.stat().st_size)


def folder_bytes_per_second(folder: Path) -> float:
    """Measure the read speed of a folder's disk with a temporary file of 32 MiB. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".edgespec-", buffering=0) as file:
        for _ in range(_MEASURED_BYTES // READ_BYTES):
            write_all(file.fileno(), os.urandom(READ_BYTES))
        os.fsync(file.fileno())
        return read_bytes_per_second(Path(file.name))


def read_bytes_per_second(path: Path) -> float:
    """Measure a disk's read speed by reading parts of a file for up to 0.3 seconds. Raises OSError."""
    file, parts = open_uncached(path), max(1, path.stat().st_size // READ_BYTES)
    began = now()

    def read(first: int) -> int:
        done = 0
        with mmap.mmap(-1, READ_BYTES) as buffer:
            for i in range(first, parts, PARALLEL_READS):
                # Keep consecutive reads far apart, so that the disk's own cache does not serve them.
                offset = i * 7919 % parts * READ_BYTES
                # If the page cache cannot be bypassed, it would otherwise be measured instead of the disk.
                drop_cached(file, offset, READ_BYTES)
                done += os.preadv(file, [buffer], offset)
                drop_cached(file, offset, READ_BYTES)
                if now() - began > _READ_SECONDS:
                    break
        return done

    try:
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            return sum(pool.map(read, range(PARALLEL_READS))) / max(now() - began, 1e-9)
    finally:
        os.close(file)
