"""Determine the limits on this process's memory, set by the machine, cgroups, the shell and a Mac's GPU."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.system.cgroups import control_groups
from edgespec.system.heap import address_space_is_limited

if sys.platform != "win32":
    import resource

__all__ = ["Limit", "address_limit", "apple_limit", "cgroup_limits", "process_limits"]

# Limits above this count as unlimited, because cgroup v1 reports "no limit" as a number near 2^63.
_UNLIMITED_BYTES = 1 << 60
_NAMES = {
    False: ("memory.max", "memory.current", "inactive_file"),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Round the free address space down to a multiple of this many bytes, so that small changes in memory use do
# not change the budget.
_ADDRESS_STEP_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on this process's memory.

    Attributes:
        free_bytes: How many more bytes this process can use.
        what: User-facing description of what imposes the limit.
        hard: Whether the system enforces the limit, by failing allocations or killing the process.
    """

    free_bytes: int
    what: str
    hard: bool = False


def process_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Return all limits on this process's memory, the available memory first.

    `root` contains /proc and /sys.
    """
    limits = [Limit(int(psutil.virtual_memory().available), "the available memory of this machine")]
    limits += cgroup_limits(root)
    if limit := address_limit():
        limits.append(limit)
    if sys.platform == "darwin":
        limits.append(apple_limit())
    return tuple(limits)


def cgroup_limits(root: Path = Path("/")) -> Iterator[Limit]:
    """Yield the limits set by this process's cgroups (versions 1 and 2) and their parents.

    Inactive page cache counts as free, because the kernel reclaims it on demand.
    """
    for group in control_groups("memory", root):
        limit_file, usage_file, inactive_key = _NAMES[group.version_1]
        limit = _number(group.read(limit_file))
        if 0 <= limit < _UNLIMITED_BYTES:
            stat = dict(line.partition(" ")[::2] for line in group.read("memory.stat").splitlines())
            used = max(0, _number(group.read(usage_file))) - max(0, _number(stat.get(inactive_key, "")))
            yield Limit(
                max(0, limit - max(0, used)), f"the memory limit of the control group {group.name}", hard=True
            )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def address_limit() -> Limit | None:
    """Return the address space limit (`ulimit -v`), or None if it is not set.

    Mapped files and thread stacks count towards this limit even if they are not resident.
    """
    if not address_space_is_limited():
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = soft - int(psutil.Process().memory_info().vms)
    rounded = max(0, free // _ADDRESS_STEP_BYTES * _ADDRESS_STEP_BYTES)
    return Limit(rounded, "the limit of the address space (ulimit -v)", hard=True)


def apple_limit() -> Limit:
    """Return the limit on the memory that a Mac's GPU can keep resident.

    Weights beyond this limit would be paged out between passes. The limit is `iogpu.wired_limit_mb` if set.
    Otherwise, it is two thirds of the memory on Macs with up to 36 GiB, and three quarters on larger ones.
    """
    total = int(psutil.virtual_memory().total)
    limit, what = _wired_bytes(), "the wired limit of the GPU (iogpu.wired_limit_mb)"
    if limit <= 0:
        limit = total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4
        what = "the working set that Apple recommends for the GPU"
    return Limit(max(0, limit - int(psutil.Process().memory_info().rss)), what)


@functools.cache
def _wired_bytes() -> int:
    """Return the user's limit on resident GPU memory on macOS, or 0 if it is not set."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
        return int(done.stdout.strip()) * 2**20
    return 0
