"""Controls over glibc's malloc, which otherwise retains freed memory for the process.

Every function here does nothing on systems without glibc.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

if sys.platform != "win32":
    import resource

__all__ = [
    "address_space_is_limited",
    "limit_malloc_arenas",
    "release_free_memory",
    "retained_bytes",
    "unmap_freed_buffers",
]

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Thresholds of `unmap_freed_buffers`: buffers from the first size on are mapped on their own, and a heap
# retains at most the second at its end. Chosen: glibc starts with 128 KiB for both and raises them.
_LARGE_BUFFER_BYTES, _RETAINED_BYTES = 128 * 2**10, 2**20


def address_space_is_limited() -> bool:
    """Return whether the address space of this process has a limit (`ulimit -v`)."""
    if sys.platform == "win32":
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return soft not in (resource.RLIM_INFINITY, -1)


def limit_malloc_arenas() -> None:
    """Let threads started from now on share one malloc arena if the address space is limited.

    Otherwise glibc reserves 64 MiB of addresses for each thread, although a thread uses little of it.
    """
    if address_space_is_limited():
        _set_malloc_option(_ARENA_MAX, 1)


@cache
def unmap_freed_buffers() -> None:
    """Return every freed buffer of 128 KiB or more to the system at once, for the rest of the process.

    By default malloc learns to take buffers of up to 32 MiB from its heap. Freed ones then stay in the
    resident memory of the process, although the library that freed them counts them as free.
    """
    _set_malloc_option(_MMAP_THRESHOLD, _LARGE_BUFFER_BYTES)
    _set_malloc_option(_TRIM_THRESHOLD, _RETAINED_BYTES)


def retained_bytes() -> int:
    """Return how many freed bytes malloc retains at most after `unmap_freed_buffers`."""
    return _RETAINED_BYTES if sys.platform == "linux" else 0


def release_free_memory() -> None:
    """Return freed memory from malloc's heap to the system (`malloc_trim`)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _set_malloc_option(option: int, value: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(option, value)
