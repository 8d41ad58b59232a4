"""Determine how much memory this process can use, and how much it is using."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from edgespec.errors import MemoryBudgetError
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES, PLANNING_BYTES, RESERVE_SHARE
from edgespec.memory.limits import Limit, process_limits
from edgespec.model.registry import process_bytes
from edgespec.system.files import format_bytes

if sys.platform != "win32":
    # Import the module now, because `peak_bytes` may be called during interpreter shutdown, when imports
    # fail.
    import resource

__all__ = [
    "Budget",
    "available_bytes",
    "check_room_to_plan",
    "find_budget",
    "peak_bytes",
    "resident_bytes",
]


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
        more = f", more than the {format_bytes(total)} of this machine" if memory_bytes > total else ""
        size, source = memory_bytes, f"--memory{more}"
        least, enforced_by = min((usable(limit) for limit in limits if limit.hard), default=(size, ""))
        if least < size:
            size, source = least, f"{enforced_by}, which is below {source}"
    source += "".join(f"; {format_bytes(free)} free on {name}" for name, free in cards)
    gpu_bytes = sum(max(0, free - reserve(free)) for _, free in cards) if cards else None
    return Budget(size, source, gpu_bytes, reserve(min(limit.free_bytes for limit in limits)))


def check_room_to_plan() -> None:
    """Check that there is enough memory to read a model's metadata. llama.cpp would abort without it.

    Raises:
        MemoryBudgetError: There is not enough memory.
    """
    least = min(process_limits(), key=lambda limit: limit.free_bytes)
    if least.free_bytes < PLANNING_BYTES:
        raise MemoryBudgetError(
            f"planning needs {format_bytes(PLANNING_BYTES)} of memory, but {least.what} leaves"
            f" {format_bytes(least.free_bytes)}",
            "close other programs, or raise the limit",
            code="out_of_memory",
        )


def available_bytes() -> int:
    """Return how many more bytes of memory this process can use within all limits."""
    return min(limit.free_bytes for limit in process_limits())


def resident_bytes() -> int:
    """Return this process's current memory use in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return this process's peak memory use in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
