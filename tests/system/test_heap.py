"""Controls for malloc. Each test runs in a separate process, because the effect is permanent."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is that of Linux")

_MIB = 2**20
_STATUS = """
import ctypes, resource, sys, threading
from edgespec.system.heap import unmap_freed_buffers, limit_malloc_arenas

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
allocated = threading.Event()

def allocate():
    libc.malloc(1000)
    allocated.set()
    done.wait()

thread = threading.Thread(target=allocate)
thread.start()
allocated.wait()
print(status("VmSize") - before)
done.set()
"""
_BUFFERS = """
if sys.argv[1:]:
    unmap_freed_buffers()
size = 8 << 20
libc.free(libc.malloc(size))  # raises malloc's threshold: the next one comes from the heap
before = status("VmRSS")
buffer = ctypes.c_void_p(libc.malloc(size))
ctypes.memset(buffer, 1, size)
libc.malloc(100_000)  # pins the heap's end
libc.free(buffer)
print(status("VmRSS") - before)
"""


def _run(program: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _STATUS + program, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_threads_share_one_arena_where_the_address_space_is_limited() -> None:
    assert _run(_THREAD) > 64 * _MIB
    assert _run(_THREAD, "shared") < 32 * _MIB


def test_freed_large_buffers_are_returned_to_the_system() -> None:
    assert _run(_BUFFERS) > 4 * _MIB
    assert _run(_BUFFERS, "returned") < 2 * _MIB
