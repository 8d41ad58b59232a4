"""Measure how fast a file can be read from its disk."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter as now

__all__ = ["PARALLEL_READS", "READ_BYTES", "open_uncached", "read_bytes_per_second"]

PARALLEL_READS, READ_BYTES = 4, 2 << 20
"""Number of reads at a time and their size, for the full speed of a disk. On a virtual disk, four reads of
2 MB reached 1.0 to 1.1 GB/s, and one of 8 MB only 0.4 to 0.8."""
# Time limit for a measurement. It was chosen so that nobody notices the wait.
_SECONDS = 0.3


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
    file, parts = open_uncached(path), max(1, path.stat().st_size // READ_BYTES)
    began = now()

    def read(first: int) -> int:
        done = 0
        with mmap.mmap(-1, READ_BYTES) as buffer:
            for i in range(first, parts, PARALLEL_READS):
                # Consecutive reads are far apart, so that a disk's own cache does not answer them.
                done += os.preadv(file, [buffer], i * 7919 % parts * READ_BYTES)
                if now() - began > _SECONDS:
                    break
        return done

    try:
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            return sum(pool.map(read, range(PARALLEL_READS))) / max(now() - began, 1e-9)
    finally:
        os.close(file)
