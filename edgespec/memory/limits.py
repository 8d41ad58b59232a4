"""What limits the memory of this process: the machine, a container, the shell. Each says where it is from.

All numbers are of the whole process: what it holds now counts as its own.
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

# What a limit counts as none from: cgroup v1 says "no limit" with a number near 2^63.
_UNLIMITED_BYTES = 1 << 60
# The limit of a control group, what it holds, and of that what files take that nobody needs, by version.
_NAMES = {
    False: ("memory.max", "memory.current", "inactive_file"),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Threads that a backend may start beside those that compute: of a reply, of a rest, one that a library makes.
_MORE_THREADS = 3
# glibc gives a thread so much where there is no limit for stacks.
_USUAL_STACK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """So many bytes this process may hold, and why, in words.

    hard: what is beyond is refused by the system. stack_bytes: of it that threads take which are still to be
    started; None where memory that nobody touches counts for nothing.
    """

    bytes: int
    what: str
    hard: bool = False
    stack_bytes: int | None = None


def process_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Everything that limits this process now; the system's available memory is always among it.

    root: the folder under which /proc and /sys are.
    """
    process = psutil.Process()
    held = int(process.memory_info().rss)
    available = int(psutil.virtual_memory().available) + held
    found = [Limit(available, "memory that the system has available")]
    found += cgroup_limits(held, root)
    if limit := address_limit(held, int(process.memory_info().vms)):
        found.append(limit)
    if sys.platform == "darwin" and (limit := apple_limit()):
        found.append(limit)
    return tuple(found)


def cgroup_limits(held_bytes: int, root: Path = Path("/")) -> Iterator[Limit]:
    """Limits of the control groups that this process is in, and of those around them; version 1 and 2.

    What other processes of a group hold is not there for this one; caches of files would be given up.
    """
    for group in control_groups("memory", root):
        names = _NAMES[group.version_1]
        if (limit := _limit_of(group, names, held_bytes)) is not None:
            yield Limit(limit, f"the memory limit of the control group {group.name}", hard=True)


def _limit_of(group: ControlGroup, names: tuple[str, str, str], held_bytes: int) -> int | None:
    limit = _number(group.read(names[0]))
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    used = (_number(group.read(names[1])) or 0) - _idle_files(group.read("memory.stat"), names[2])
    return max(0, limit - max(0, used - held_bytes))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _idle_files(told: str, name: str) -> int:
    """Bytes of a group that are pages of files nobody needs now."""
    for line in told.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def address_limit(held_bytes: int, mapped_bytes: int) -> Limit | None:
    """The limit of the address space (`ulimit -v`), where one is set.

    Mapped files and stacks of threads count towards it as well, whether or not they are in memory.
    held_bytes, mapped_bytes: what the process holds, and all it has addresses for.
    """
    if not address_space_is_limited():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = max(0, soft - mapped_bytes) + held_bytes
    return Limit(left, "the limit of the address space (ulimit -v)", hard=True, stack_bytes=_stack_bytes())


def _stack_bytes() -> int:
    """What the stacks of threads take that are still to be started."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    each = _USUAL_STACK_BYTES if soft in (resource.RLIM_INFINITY, -1) else soft
    return each * (usable_cores() + _MORE_THREADS)


def apple_limit() -> Limit | None:
    """What a Mac lets its graphics processor keep in place: `iogpu.wired_limit_mb`, or Apple's usual share.

    Beyond it weights would be paged out between passes. Up to 36 GiB that share is two thirds of the memory,
    above three quarters.
    """
    total = int(psutil.virtual_memory().total)
    if (wired := _wired_bytes()) > 0:
        return Limit(wired, "the wired limit of the graphics processor (iogpu.wired_limit_mb)")
    share = total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4
    return Limit(share, "the working set that Apple recommends for its graphics processor")


@functools.cache
def _wired_bytes() -> int:
    """The limit that was set, 0 for none. It is asked for once: memory is looked at within replies."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"],
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
        return int(said.stdout.strip()) * 2**20
    return 0
