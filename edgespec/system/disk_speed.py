"""Measure how fast a file can be read from its disk."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter as now

__all__ = ["open_uncached", "read_bytes_per_second"]

# Size of one read, and the time limit for all of them. They were chosen to reach the full speed of a fast
# disk without a noticeable wait.
_READ_BYTES, _SECONDS = 8 << 20, 0.3


def open_uncached(path: Path) -> int:
    """Open a file for reading without the page cache, where the file system allows it. Raises OSError.

    Reading a large file through the page cache would evict the files of other programs.
    """
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            # Some file systems open the file but then refuse to read it in this way.
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(file, [page], 0)
            return file
        except OSError:
            os.close(file)
    return os.open(path, os.O_RDONLY)


def read_bytes_per_second(path: Path) -> float:
    """Read parts from all over a file for up to 0.3 seconds. Raises OSError."""
    file, size_bytes = open_uncached(path), path.stat().st_size
    try:
        with mmap.mmap(-1, _READ_BYTES) as buffer:
            began, done = now(), 0
            parts = max(1, size_bytes // _READ_BYTES)
            for i in range(parts):
                # Consecutive reads are far apart, so that a disk's own cache does not answer them.
                done += os.preadv(file, [buffer], i * 7919 % parts * _READ_BYTES)
                if now() - began > _SECONDS:
                    break
            return done / max(now() - began, 1e-9)
    finally:
        os.close(file)
