"""Tune glibc's malloc, which by default does not return all freed memory to the system.

On systems without glibc, the functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

if sys.platform != "win32":
    import resource

# Parameter numbers of glibc's `mallopt`, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Values for malloc's mmap and trim thresholds, in bytes.
_LARGE_BUFFER_BYTES, _RETAINED_BYTES = 128 * 2**10, 2**20


def address_space_is_limited() -> bool:
    """Return whether the address space of this process is limited (`ulimit -v`)."""
    if sys.platform == "win32":
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return soft not in (resource.RLIM_INFINITY, -1)


def limit_malloc_arenas() -> None:
    """Make later threads share one malloc arena if the address space is limited.

    By default, glibc reserves 64 MiB of address space per thread, most of which stays unused.
    """
    if address_space_is_limited():
        _set_malloc_option(_ARENA_MAX, 1)


@cache
def unmap_freed_buffers() -> None:
    """Make malloc return every buffer of at least 128 KiB to the system as soon as it is freed.

    By default, freed buffers of up to 32 MiB can remain in the process's resident memory.
    """
    _set_malloc_option(_MMAP_THRESHOLD, _LARGE_BUFFER_BYTES)
    _set_malloc_option(_TRIM_THRESHOLD, _RETAINED_BYTES)


def release_free_memory() -> None:
    """Return freed memory from malloc's heap to the system (`malloc_trim`)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _set_malloc_option(option: int, value: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(option, value)
