"""Find the memory limits set for this process by the machine, control groups, the shell and a Mac's GPU.

A limit is the total memory that this process may use, including the memory that it already uses.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.cgroups import ControlGroup, control_groups
from edgespec.cores import usable_cores
from edgespec.heap import address_space_is_limited

if sys.platform != "win32":
    import resource

__all__ = [
    "Limit",
    "address_limit",
    "apple_limit",
    "cgroup_limits",
    "process_limits",
]

# Treat higher limits as unlimited, because cgroup v1 reports "no limit" as a number near 2^63.
_UNLIMITED_BYTES = 1 << 60
# For each control group version (True is version 1): the files that contain the limit and the usage, and the
# key of the inactive page cache in memory.stat.
_NAMES = {
    False: ("memory.max", "memory.current", "inactive_file"),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Number of threads that may start besides the compute threads: for replies, idle work and a library.
_MORE_THREADS = 3
# Default size of a thread's stack in glibc if no stack limit is set.
_DEFAULT_STACK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the memory of this process.

    Attributes:
        bytes: total memory that this process may use, in bytes.
        what: user-facing description of where the limit comes from.
        hard: whether the system refuses memory beyond the limit or kills the process.
        stack_bytes: address space for the stacks of threads that have not started yet. None if the limit only
            counts memory that is actually written to.
    """

    bytes: int
    what: str
    hard: bool = False
    stack_bytes: int | None = None


def process_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Return all current limits of this process, starting with the system's available memory.

    Args:
        root: the folder that contains /proc and /sys.
    """
    process = psutil.Process()
    held = int(process.memory_info().rss)
    available = int(psutil.virtual_memory().available) + held
    found = [Limit(available, "the available memory of this machine")]
    found += cgroup_limits(held, root)
    if limit := address_limit(held, int(process.memory_info().vms)):
        found.append(limit)
    if sys.platform == "darwin" and (limit := apple_limit()):
        found.append(limit)
    return tuple(found)


def cgroup_limits(held_bytes: int, root: Path = Path("/")) -> Iterator[Limit]:
    """Yield the limits of this process's control groups (versions 1 and 2) and their parents.

    Memory used by other processes in a group reduces the limit. Their inactive page cache does not count,
    because the kernel frees it on demand.

    Args:
        held_bytes: the resident memory of this process.
        root: the folder that contains /proc and /sys.
    """
    for group in control_groups("memory", root):
        names = _NAMES[group.version_1]
        if (limit := _limit_of(group, names, held_bytes)) is not None:
            yield Limit(limit, f"the memory limit of the control group {group.name}", hard=True)


def _limit_of(group: ControlGroup, names: tuple[str, str, str], held_bytes: int) -> int | None:
    limit = _number(group.read(names[0]))
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    used = (_number(group.read(names[1])) or 0) - _inactive_file_bytes(group.read("memory.stat"), names[2])
    return max(0, limit - max(0, used - held_bytes))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(stat: str, name: str) -> int:
    """Return the size of a group's inactive page cache, given the content of its memory.stat."""
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def address_limit(held_bytes: int, mapped_bytes: int) -> Limit | None:
    """Return the address space limit (`ulimit -v`), or None if it is not set.

    Mapped files and thread stacks count towards it, whether or not they are in memory.

    Args:
        held_bytes: the resident memory of this process.
        mapped_bytes: the address space currently used by this process.
    """
    if not address_space_is_limited():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = max(0, soft - mapped_bytes) + held_bytes
    return Limit(left, "the limit of the address space (ulimit -v)", hard=True, stack_bytes=_stack_bytes())


def _stack_bytes() -> int:
    """Return the address space needed for the stacks of threads that have not started yet."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    each = _DEFAULT_STACK_BYTES if soft in (resource.RLIM_INFINITY, -1) else soft
    return each * (usable_cores() + _MORE_THREADS)


def apple_limit() -> Limit | None:
    """Return the memory that a Mac's GPU can keep resident.

    Weights beyond this limit would be paged out between passes. The limit is `iogpu.wired_limit_mb` if set.
    It defaults to two thirds of memory on machines with up to 36 GiB, and to three quarters on larger ones.
    """
    total = int(psutil.virtual_memory().total)
    if (wired := _wired_bytes()) > 0:
        return Limit(wired, "the wired limit of the GPU (iogpu.wired_limit_mb)")
    share = total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4
    return Limit(share, "the working set that Apple recommends for the GPU")


@functools.cache
def _wired_bytes() -> int:
    """Return the wired limit, or 0 if it is not set. The result is cached for checks during replies."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"],
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
        return int(done.stdout.strip()) * 2**20
    return 0
