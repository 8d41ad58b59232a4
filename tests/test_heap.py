"""What malloc keeps, in processes of their own: it is told once and for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is that of Linux")

_MIB = 2**20
_STATUS = """
import ctypes, resource, sys, threading
from edgespec.heap import unmap_freed_buffers, limit_malloc_arenas

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
"""
_THREAD = """
if sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    limit_malloc_arenas()
before, done = status("VmSize"), threading.Event()
asked = threading.Event()

def ask():
    libc.malloc(1000)
    asked.set()
    done.wait()

thread = threading.Thread(target=ask)
thread.start()
asked.wait()
print(status("VmSize") - before)
done.set()
"""
_BUFFERS = """
if sys.argv[1:]:
    unmap_freed_buffers()
size = 8 << 20
libc.free(libc.malloc(size))  # by this malloc learns to take as much from its heap
before = status("VmRSS")
buffer = ctypes.c_void_p(libc.malloc(size))
ctypes.memset(buffer, 1, size)
libc.malloc(100_000)  # stays, after it
libc.free(buffer)
print(status("VmRSS") - before)
"""
_APART = """
import contextlib
from edgespec.heap import large_buffers_apart

size = 2 << 20
libc.free(libc.malloc(size))
before = status("VmRSS")
with large_buffers_apart() if sys.argv[1:] else contextlib.nullcontext():
    buffer = ctypes.c_void_p(libc.malloc(size))
ctypes.memset(buffer, 1, size)
libc.malloc(100_000)  # stays, after it
libc.free(buffer)
print(status("VmRSS") - before)
"""
_AGAIN = """
from edgespec.heap import large_buffers_apart, unmap_freed_buffers

with large_buffers_apart():
    pass
if "returned" in sys.argv[1:]:
    unmap_freed_buffers()
    with large_buffers_apart():
        pass
def use():
    buffer = ctypes.c_void_p(libc.malloc(1 << 20))
    ctypes.memset(buffer, 1, 1 << 20)
    libc.free(buffer)

if "interrupted" in sys.argv[1:]:
    import edgespec.heap

    def interrupt(*_):
        raise KeyboardInterrupt

    tell, edgespec.heap._set_thresholds = edgespec.heap._set_thresholds, interrupt
    try:
        with large_buffers_apart():
            pass
    except KeyboardInterrupt:
        edgespec.heap._set_thresholds = tell
    with large_buffers_apart():
        pass

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _said(program: str, *how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _STATUS + program, *how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_threads_reserve_no_heap_of_their_own() -> None:
    assert _said(_THREAD) > 64 * _MIB
    assert _said(_THREAD, "shared") < 32 * _MIB


def test_large_buffers_are_the_systems_when_they_are_freed() -> None:
    assert _said(_BUFFERS) > 4 * _MIB
    assert _said(_BUFFERS, "returned") < 2 * _MIB


def test_buffers_made_apart_leave_no_hole() -> None:
    assert _said(_APART) > 1 * _MIB
    assert _said(_APART, "apart") < 1 * _MIB


def test_afterwards_what_is_freed_is_used_again() -> None:
    """A reply asks for the same with each token: pages that were new each time would take longer than it."""
    assert 4 * _said(_AGAIN) < _said(_AGAIN, "returned"), "and what MLX asked for stays"


def test_what_was_interrupted_where_it_began_is_over() -> None:
    assert 4 * _said(_AGAIN, "interrupted") < _said(_AGAIN, "returned")
