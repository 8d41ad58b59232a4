"""Find out how much memory this process may use, and how much it currently uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from edgespec.backends.registry import process_bytes
from edgespec.errors import MemoryBudgetError
from edgespec.files import format_bytes
from edgespec.memory.limits import Limit, process_limits

if sys.platform != "win32":
    import resource  # Import early, because a reply may end during interpreter shutdown.

__all__ = [
    "ADDRESS_STEP_BYTES",
    "DEFAULT_RESERVE_BYTES",
    "PROCESS_ADDRESS_STEP_BYTES",
    "Budget",
    "available_bytes",
    "check_room_to_plan",
    "find_budget",
    "peak_bytes",
    "resident_bytes",
    "within_limits",
]

# By default, reserve 512 MiB for other programs, or 5 % of total memory if that is less.
DEFAULT_RESERVE_BYTES = 512 * 2**20
_RESERVE_SHARE = 0.05
# Under `ulimit -v`, round budgets down to multiples of these sizes. The memory used by libraries varies
# slightly between runs, and rounding makes a plan and the load that follows it use the same budget.
ADDRESS_STEP_BYTES, PROCESS_ADDRESS_STEP_BYTES = 2**20, 16 * 2**20
# Memory that llama.cpp needs to report the size of a model. It aborts the process if there is less.
_PLANNING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the memory that this process may use.

    Attributes:
        bytes: system memory that this process may use, in bytes.
        source: user-facing description of where `bytes` comes from.
        gpu_bytes: usable memory of all graphics cards with their own memory; 0 if there are none.
        limits: the process limits that were compared to find `bytes`; empty if the user set the budget.
        reserve_bytes: memory to keep free for other programs. If less is free, cached prefixes are dropped.
    """

    bytes: int
    source: str
    gpu_bytes: int = 0
    limits: tuple[Limit, ...] = ()
    reserve_bytes: int = DEFAULT_RESERVE_BYTES


def find_budget(
    memory_bytes: int | None = None,
    cards: Sequence[tuple[str, int]] = (),
    reserve_bytes: int | None = None,
) -> Budget:
    """Return the user's budget or, by default, the memory that this machine and its limits leave free.

    Args:
        memory_bytes: the value of `--memory`, which limits system memory. Defaults to the available memory.
        cards: name and number of free bytes of each graphics card with its own memory.
        reserve_bytes: memory to leave for other programs. Defaults to 512 MiB or 5 % of total memory.
    """
    limits = process_limits()
    total = int(psutil.virtual_memory().total)
    gpu_bytes = sum(max(0, free - _reserve(free, reserve_bytes)) for _, free in cards)
    on_cards = "".join(f"; {format_bytes(free)} free on {name}" for name, free in cards)
    reserve = _reserve(min(limit.bytes for limit in limits), reserve_bytes)
    if memory_bytes is not None:
        more = f", more than the {format_bytes(total)} of this machine" if memory_bytes > total else ""
        return Budget(memory_bytes, f"--memory{more}{on_cards}", gpu_bytes, reserve_bytes=reserve)
    least, source = min(_usable_bytes(limit, reserve_bytes) for limit in limits)
    return Budget(least, f"{source}{on_cards}", gpu_bytes, limits, reserve)


def within_limits(budget: Budget, reserve_bytes: int | None = None) -> Budget:
    """Return the budget, reduced if it exceeds a hard limit of this process."""
    hard = [_usable_bytes(limit, reserve_bytes) for limit in process_limits() if limit.hard]
    least, source = min(hard, default=(budget.bytes, ""))
    if budget.limits or least >= budget.bytes:
        return budget
    return replace(budget, bytes=least, source=f"{source}: that is less than {budget.source}")


def _usable_bytes(limit: Limit, reserve_bytes: int | None) -> tuple[int, str]:
    """Return the number of bytes within a limit that edgespec may use, and the calculation as text."""
    if limit.stack_bytes is None:
        kept_free, purpose = _reserve(limit.bytes, reserve_bytes), "for other programs"
    else:
        kept_free, purpose = limit.stack_bytes, "for stacks of threads"
    source = f"{limit.what}, less {format_bytes(kept_free)} {purpose}"
    # Plans already include Python and its libraries. Subtract any other memory used by this process.
    process = process_bytes()
    held = resident_bytes()
    if (other := held - process) > 0:
        source += f" and {format_bytes(other)} that this process holds already"
    own = min(held, process)
    if limit.stack_bytes is None:
        return max(0, limit.bytes - held - kept_free + own), source
    left = limit.bytes - held - kept_free + own // PROCESS_ADDRESS_STEP_BYTES * PROCESS_ADDRESS_STEP_BYTES
    return max(0, left // ADDRESS_STEP_BYTES * ADDRESS_STEP_BYTES), source


def _reserve(limit_bytes: int, reserve_bytes: int | None) -> int:
    if reserve_bytes is not None:
        return reserve_bytes
    return min(int(limit_bytes * _RESERVE_SHARE), DEFAULT_RESERVE_BYTES)


def check_room_to_plan() -> None:
    """Check that there is enough memory to read a model's metadata. Otherwise, llama.cpp would abort.

    Raises:
        MemoryBudgetError: there is not enough memory.
    """
    least = min(process_limits(), key=lambda limit: limit.bytes)
    left = max(0, least.bytes - resident_bytes())
    if left < _PLANNING_BYTES:
        raise MemoryBudgetError(
            f"planning needs {format_bytes(_PLANNING_BYTES)} of memory, and {least.what} leaves"
            f" {format_bytes(left)}",
            "close other programs, or raise the limit",
        )


def available_bytes() -> int:
    """Return the memory available to a new program or to this process, whichever is less."""
    return min(limit.bytes for limit in process_limits()) - resident_bytes()


def resident_bytes() -> int:
    """Return the memory currently used by this process."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the peak memory usage of this process."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
