"""The memory limits of this process: of the machine, of control groups, of the shell and of a Mac's GPU.

A limit is the total that this process may use. What it uses already is part of it.
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

# Higher limits count as none: cgroup v1 reports "no limit" as a number near 2^63.
_UNLIMITED_BYTES = 1 << 60
# The files of a control group with its limit and its usage, and the key of its inactive page cache in
# memory.stat; by whether it is version 1.
_NAMES = {
    False: ("memory.max", "memory.current", "inactive_file"),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Threads that may start beside the compute threads: for a reply, for idle work, and one of a library.
_MORE_THREADS = 3
# Stack size of a thread in glibc where no stack limit is set.
_DEFAULT_STACK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the memory of this process.

    Attributes:
        bytes: the memory that this process may use in total.
        what: where the limit comes from, for people.
        hard: whether the system refuses memory beyond it, or ends the process.
        stack_bytes: addresses for the stacks of threads that are still to start; None where only memory that
            is written to counts.
    """

    bytes: int
    what: str
    hard: bool = False
    stack_bytes: int | None = None


def process_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Return all limits of this process now. The first is the system's available memory.

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
    """Yield the limits of this process's control groups and their parents, version 1 and 2.

    Memory of other processes in a group lowers the limit. Their inactive page cache does not, because the
    kernel drops it on demand.

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
    """Return the inactive page cache of a group, from its memory.stat."""
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def address_limit(held_bytes: int, mapped_bytes: int) -> Limit | None:
    """Return the limit of the address space (`ulimit -v`); None if none is set.

    Mapped files and thread stacks count towards it, whether they are in memory or not.

    Args:
        held_bytes: the resident memory of this process.
        mapped_bytes: its address space in use.
    """
    if not address_space_is_limited():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = max(0, soft - mapped_bytes) + held_bytes
    return Limit(left, "the limit of the address space (ulimit -v)", hard=True, stack_bytes=_stack_bytes())


def _stack_bytes() -> int:
    """Return the addresses for the stacks of threads that are still to start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    each = _DEFAULT_STACK_BYTES if soft in (resource.RLIM_INFINITY, -1) else soft
    return each * (usable_cores() + _MORE_THREADS)


def apple_limit() -> Limit | None:
    """Return the memory that a Mac's GPU can keep resident: `iogpu.wired_limit_mb`, or the default share.

    Weights beyond it would be paged out between passes. The default share is two thirds of the memory up to
    36 GiB, and three quarters above.
    """
    total = int(psutil.virtual_memory().total)
    if (wired := _wired_bytes()) > 0:
        return Limit(wired, "the wired limit of the GPU (iogpu.wired_limit_mb)")
    share = total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4
    return Limit(share, "the working set that Apple recommends for the GPU")


@functools.cache
def _wired_bytes() -> int:
    """Return the wired limit that was set; 0 for none. Cached, because limits are checked during replies."""
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
