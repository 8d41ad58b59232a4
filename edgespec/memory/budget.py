"""Determine how much memory this process can use, and how much it is using.

The limits come from the machine, cgroups, the shell (`ulimit`) and, on a Mac, the GPU.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.errors import MemoryBudgetError
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES, PLANNING_BYTES, RESERVE_SHARE
from edgespec.model.registry import process_bytes
from edgespec.system.cores import control_groups
from edgespec.system.files import format_bytes
from edgespec.system.heap import address_space_is_limited

if sys.platform != "win32":
    import resource

__all__ = [
    "Budget",
    "Limit",
    "address_limit",
    "apple_limit",
    "available_bytes",
    "cgroup_limits",
    "check_room_to_plan",
    "find_budget",
    "peak_bytes",
    "process_limits",
    "resident_bytes",
]

# Limits above this count as unlimited, because cgroup v1 reports "no limit" as a number close to 2^63.
_UNLIMITED_BYTES = 1 << 60
_NAMES = {
    False: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
# The free address space is rounded down to a multiple of this many bytes, so that small changes in memory use
# do not change the budget.
_ADDRESS_STEP_BYTES = 4 * 2**20


if sys.platform != "win32":
    # Import the module early, because `peak_bytes` may be called during interpreter shutdown, when imports
    # fail.
    import resource


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on this process's memory use.

    Attributes:
        bytes: System memory that this process can use, in bytes.
        source: User-facing description of what determines `bytes`.
        gpu_bytes: Usable memory on all GPUs with dedicated memory, in bytes. None if there are none.
        reserve_bytes: Memory to keep free for other programs, in bytes. If less is free, cached prefixes are
            evicted.
    """

    bytes: int
    source: str
    gpu_bytes: int | None = None
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    @property
    def total_bytes(self) -> int:
        """Usable system and GPU memory, in bytes."""
        return self.bytes + (self.gpu_bytes or 0)


def find_budget(
    memory_bytes: int | None = None,
    cards: Sequence[tuple[str, int]] = (),
    reserve_bytes: int | None = None,
) -> Budget:
    """Determine how much memory this process may use.

    If the system enforces a lower limit than the user's, such as a cgroup limit, the lower limit applies.

    Args:
        memory_bytes: The value of `--memory`, which limits system memory. Defaults to the available memory.
        cards: Name and free bytes of each GPU with dedicated memory.
        reserve_bytes: Memory to leave for other programs. Defaults to 5 % of the free memory, up to 512 MiB.
    """

    def reserve(free_bytes: int) -> int:
        default = min(int(free_bytes * RESERVE_SHARE), DEFAULT_RESERVE_BYTES)
        return default if reserve_bytes is None else reserve_bytes

    def usable(limit: Limit) -> tuple[int, str]:
        kept_free = reserve(limit.free_bytes)
        source = f"{limit.what}, minus {format_bytes(kept_free)} for other programs"
        # `limit.free_bytes` does not include the memory that this process already uses.
        return max(0, limit.free_bytes - kept_free + process_bytes()), source

    limits = process_limits()
    if memory_bytes is None:
        size, source = min(map(usable, limits))
    else:
        total = int(psutil.virtual_memory().total)
        more = f", more than this machine's {format_bytes(total)}" if memory_bytes > total else ""
        size, source = memory_bytes, f"--memory{more}"
        least, enforced_by = min((usable(limit) for limit in limits if limit.hard), default=(size, ""))
        if least < size:
            size, source = least, f"{enforced_by}, which is below {source}"
    source += "".join(f"; {format_bytes(free)} free on {name}" for name, free in cards)
    gpu_bytes = sum(max(0, free - reserve(free)) for _, free in cards) if cards else None
    return Budget(size, source, gpu_bytes, reserve(min(limit.free_bytes for limit in limits)))


def check_room_to_plan() -> None:
    """Check that there is enough memory to read a model's metadata, because llama.cpp aborts if there is not.

    Raises:
        MemoryBudgetError: There is not enough memory.
    """
    least = min(process_limits(), key=lambda limit: limit.free_bytes)
    if least.free_bytes < PLANNING_BYTES:
        raise MemoryBudgetError(
            f"edgespec needs {format_bytes(PLANNING_BYTES)} of memory to read a model's metadata, but only"
            f" {format_bytes(least.free_bytes)} is left ({least.what})",
            "close other programs, or raise the memory limit",
            code="out_of_memory",
        )


def available_bytes() -> int:
    """Return how many more bytes of memory this process can use within all limits."""
    return min(limit.free_bytes for limit in process_limits())


def resident_bytes() -> int:
    """Return this process's current resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return this process's peak memory use in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
    """Return all limits on this process's memory, starting with the available memory.

    `root` is the folder that contains /proc and /sys.
    """
    limits = [Limit(int(psutil.virtual_memory().available), "the memory available on this machine")]
    limits += cgroup_limits(root)
    if limit := address_limit():
        limits.append(limit)
    if sys.platform == "darwin":
        limits.append(apple_limit())
    return tuple(limits)


def cgroup_limits(root: Path = Path("/")) -> Iterator[Limit]:
    """Yield the limits set by this process's cgroups (versions 1 and 2) and their parents.

    The page cache counts as free, because the kernel reclaims it on demand. This includes pages on the active
    list, which have been read more than once. Locked pages are on neither the active nor the inactive list,
    so they do not count as free.
    """
    for group in control_groups("memory", root):
        limit_file, usage_file, cache_keys = _NAMES[group.version_1]
        limit = _number(group.read(limit_file))
        if 0 <= limit < _UNLIMITED_BYTES:
            stat = dict(line.partition(" ")[::2] for line in group.read("memory.stat").splitlines())
            cached = sum(max(0, _number(stat.get(key, ""))) for key in cache_keys)
            used = max(0, _number(group.read(usage_file)) - cached)
            what = f"the memory limit of the control group {group.name}"
            yield Limit(max(0, limit - used), what, hard=True)


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
    return Limit(rounded, "the address space limit set by ulimit -v", hard=True)


def apple_limit() -> Limit:
    """Return the limit on the memory that a Mac's GPU can keep resident.

    Weights beyond this limit would be paged out between passes. The limit is `iogpu.wired_limit_mb` if it is
    set. Otherwise, it is two thirds of the memory on Macs with up to 36 GiB, and three quarters on larger
    ones.
    """
    total = int(psutil.virtual_memory().total)
    limit, what = _wired_bytes(), "the GPU's limit on wired memory (iogpu.wired_limit_mb)"
    if limit <= 0:
        limit = total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4
        what = "the amount of GPU memory that macOS recommends"
    return Limit(max(0, limit - int(psutil.Process().memory_info().rss)), what)


@functools.cache
def _wired_bytes() -> int:
    """Return the user-configured limit on resident GPU memory on macOS, or 0 if it is not set."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
        return int(done.stdout.strip()) * 2**20
    return 0
