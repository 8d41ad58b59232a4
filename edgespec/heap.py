"""What glibc's malloc keeps beside what is in use, limited where that counts, and given back.

Nothing on other systems.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

if sys.platform != "win32":
    import resource

__all__ = [
    "address_space_is_limited",
    "large_buffers_apart",
    "limit_malloc_arenas",
    "release_free_memory",
    "retained_bytes",
    "unmap_freed_buffers",
]

# By malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE_BYTES, _TOP_BYTES = 128 * 2**10, 2**20
# What a reply computes in is freed and asked for again with each token: pages of its own would be new each
# time, and the system would have to clear them.
_REUSED_BYTES, _REUSED_TOP_BYTES = 4 * 2**20, 16 * 2**20


def address_space_is_limited() -> bool:
    """Whether there is a limit of the address space (`ulimit -v`)."""
    if sys.platform == "win32":
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return soft not in (resource.RLIM_INFINITY, -1)


def limit_malloc_arenas() -> None:
    """Where addresses are limited, let threads that begin from now on share the heaps there are.

    Each would reserve 64 MiB of addresses for one of its own, of which it uses next to nothing.
    """
    if address_space_is_limited():
        _share_one_heap()


@cache
def _share_one_heap() -> None:
    _set(_ARENA_MAX, 1)


@cache
def unmap_freed_buffers() -> None:
    """Let the system have buffers of 128 KiB and more as soon as they are freed.

    By itself malloc keeps what was freed up to 32 MiB at a time, in a heap that has holes: memory that a
    library counts as free, and the system does not.
    """
    _apart.begin(_FOR_GOOD)


@contextmanager
def large_buffers_apart() -> Iterator[None]:
    """Let buffers of 128 KiB and more that are made meanwhile have pages of their own, in whichever thread.

    Such a page takes memory once it is written to. In the heap calloc would write zeros to what was freed
    there, so that what a library holds in reserve would be in memory or not by chance. Afterwards buffers of
    4 MiB and more have pages of their own, unless `unmap_freed_buffers` was called.
    """
    whose = object()
    try:
        _apart.begin(whose)
        yield
    finally:
        _apart.end(whose)


class _Apart:
    """From which size on a buffer has pages of its own: in all threads at once.

    Who wants it is named, so that one whose beginning was interrupted can end all the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: set[object] = set()

    def begin(self, whose: object) -> None:
        with self._lock:
            self._wanted.add(whose)
            _set_thresholds(_LARGE_BYTES, _TOP_BYTES)

    def end(self, whose: object) -> None:
        with self._lock:
            self._wanted.discard(whose)
            if not self._wanted:
                _set_thresholds(_REUSED_BYTES, _REUSED_TOP_BYTES)


_apart = _Apart()
_FOR_GOOD = object()


def _set_thresholds(large_bytes: int, top_bytes: int) -> None:
    _set(_MMAP_THRESHOLD, large_bytes)
    _set(_TRIM_THRESHOLD, top_bytes)


def retained_bytes() -> int:
    """What malloc keeps of freed memory at the end of a heap, after `unmap_freed_buffers`."""
    return _TOP_BYTES if sys.platform == "linux" else 0


def release_free_memory() -> None:
    """Let the system have what was freed: malloc would keep it for this process."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _set(name: int, value: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(name, value)
