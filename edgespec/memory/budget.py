"""Find out how much memory this process may use, and how much it currently uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from edgespec.backends.registry import process_bytes
from edgespec.errors import MemoryBudgetError
from edgespec.files import format_bytes
from edgespec.memory.limits import Limit, process_limits

if sys.platform != "win32":
    import resource  # Import early, because a reply may end during interpreter shutdown.

__all__ = [
    "DEFAULT_RESERVE_BYTES",
    "Budget",
    "available_bytes",
    "check_room_to_plan",
    "find_budget",
    "peak_bytes",
    "resident_bytes",
]

# By default, reserve 512 MiB for other programs, or 5 % of the free memory if that is less.
DEFAULT_RESERVE_BYTES = 512 * 2**20
_RESERVE_SHARE = 0.05
# Memory that llama.cpp needs to report the size of a model. It aborts the process if there is less.
_PLANNING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the memory that this process may use.

    Attributes:
        bytes: system memory that this process may use, in bytes.
        source: user-facing description of where `bytes` comes from.
        gpu_bytes: usable memory of all graphics cards with their own memory; 0 if there are none.
        reserve_bytes: memory to keep free for other programs. If less is free, cached prefixes are dropped.
    """

    bytes: int
    source: str
    gpu_bytes: int = 0
    reserve_bytes: int = DEFAULT_RESERVE_BYTES


def find_budget(
    memory_bytes: int | None = None,
    cards: Sequence[tuple[str, int]] = (),
    reserve_bytes: int | None = None,
) -> Budget:
    """Return the user's budget or, by default, the memory that this machine and its limits leave free.

    The system enforces hard limits, so they also apply to the user's budget.

    Args:
        memory_bytes: the value of `--memory`, which limits system memory. Defaults to the available memory.
        cards: name and number of free bytes of each graphics card with its own memory.
        reserve_bytes: memory to leave for other programs. Defaults to 512 MiB or 5 % of the free memory.
    """

    def reserve(free_bytes: int) -> int:
        default = min(int(free_bytes * _RESERVE_SHARE), DEFAULT_RESERVE_BYTES)
        return default if reserve_bytes is None else reserve_bytes

    def usable(limit: Limit) -> tuple[int, str]:
        kept_free = reserve(limit.free_bytes)
        # The plan includes Python and its libraries, which this process already uses.
        source = f"{limit.what}, less {format_bytes(kept_free)} for other programs"
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
            size, source = least, f"{enforced_by}: that is less than {source}"
    source += "".join(f"; {format_bytes(free)} free on {name}" for name, free in cards)
    gpu_bytes = sum(max(0, free - reserve(free)) for _, free in cards)
    return Budget(size, source, gpu_bytes, reserve(min(limit.free_bytes for limit in limits)))


def check_room_to_plan() -> None:
    """Check that there is enough memory to read a model's metadata. Otherwise, llama.cpp would abort.

    Raises:
        MemoryBudgetError: there is not enough memory.
    """
    least = min(process_limits(), key=lambda limit: limit.free_bytes)
    if least.free_bytes < _PLANNING_BYTES:
        raise MemoryBudgetError(
            f"planning needs {format_bytes(_PLANNING_BYTES)} of memory, but {least.what} leaves"
            f" {format_bytes(least.free_bytes)}",
            "close other programs, or raise the limit",
        )


def available_bytes() -> int:
    """Return how much more memory the system and all limits let this process use."""
    return min(limit.free_bytes for limit in process_limits())


def resident_bytes() -> int:
    """Return the memory currently used by this process."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the peak memory usage of this process."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
