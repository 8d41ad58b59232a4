"""How much memory there is, how much was given, how much is taken."""

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
    import resource  # here: a reply may end while the interpreter does, when nothing can be imported

__all__ = [
    "OWN_STEP_BYTES",
    "STEP_BYTES",
    "Budget",
    "available_bytes",
    "check_room_to_plan",
    "find_budget",
    "peak_bytes",
    "resident_bytes",
    "within_limits",
]

# Left for other programs of what is found, and never more than the second.
_RESERVED_SHARE, _MOST_RESERVED_BYTES = 1 / 20, 2**30
# Where addresses are limited, what is left of them and what is Python's own are counted in whole steps.
STEP_BYTES, OWN_STEP_BYTES = 2**20, 16 * 2**20
# What llama.cpp may take to say how large a model and its contexts would be; without it, it aborts.
_PLANNING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be taken. source: where the number comes from, in words.

    gpu_bytes: of graphics cards with memory of their own, all together; 0 where there are none.
    limits: everything that was found, the smallest of which counts.
    """

    bytes: int
    source: str
    gpu_bytes: int = 0
    limits: tuple[Limit, ...] = ()


def find_budget(given_bytes: int | None = None, cards: Sequence[tuple[str, int]] = ()) -> Budget:
    """The budget that was given, or what this machine and its limits leave, less a reserve.

    cards: name and free bytes of graphics cards with memory of their own; --memory is for the system's.
    """
    gpu_bytes = sum(free - _reserve(free) for _, free in cards)
    on_cards = "".join(f"; {format_bytes(free)} free on {name}" for name, free in cards)
    if given_bytes is not None:
        there = int(psutil.virtual_memory().total)
        more = f", more than the {format_bytes(there)} of this machine" if given_bytes > there else ""
        return Budget(given_bytes, f"--memory{more}{on_cards}", gpu_bytes)
    limits = process_limits()
    least, source = min(map(_left_by, limits))
    return Budget(least, f"{source}{on_cards}", gpu_bytes, limits)


def within_limits(budget: Budget) -> Budget:
    """A budget that was named, or as much of it as this process can have at all: there is nothing beyond."""
    hard = [_left_by(limit) for limit in process_limits() if limit.hard]
    least, source = min(hard, default=(budget.bytes, ""))
    if budget.limits or least >= budget.bytes:
        return budget
    return replace(budget, bytes=least, source=f"{source}: that is less than {budget.source}")


def _left_by(limit: Limit) -> tuple[int, str]:
    """What a limit leaves to Python, its libraries and models, and in words what is not theirs."""
    if limit.stack_bytes is None:
        kept_free, whose = _reserve(limit.bytes), "for other programs"
    else:
        kept_free, whose = limit.stack_bytes, "for stacks of threads"
    source = f"{limit.what}, less {format_bytes(kept_free)} {whose}"
    # Python and its libraries are planned with so much; what else this process holds is no model's.
    process = process_bytes()
    held = resident_bytes()
    if (beside := held - process) > 0:
        source += f" and {format_bytes(beside)} that this one holds"
    own = min(held, process)
    if limit.stack_bytes is None:
        return max(0, limit.bytes - held - kept_free + own), source
    # Addresses are the same in every run; how much of the libraries is in memory is not.
    left = limit.bytes - held - kept_free + own // OWN_STEP_BYTES * OWN_STEP_BYTES
    return max(0, left // STEP_BYTES * STEP_BYTES), source


def _reserve(found_bytes: int) -> int:
    return min(int(found_bytes * _RESERVED_SHARE), _MOST_RESERVED_BYTES)


def check_room_to_plan() -> None:
    """Raises MemoryBudgetError where there is no memory even to look at a model: libraries would abort."""
    least = min(process_limits(), key=lambda limit: limit.bytes)
    left = max(0, least.bytes - resident_bytes())
    if left < _PLANNING_BYTES:
        raise MemoryBudgetError(
            f"this process may take {format_bytes(left)} more ({least.what}),"
            f" and looking at a model takes {format_bytes(_PLANNING_BYTES)}",
            "close other programs, or raise the limit",
        )


def available_bytes() -> int:
    """What a new program may take now: what the system has available, or a limit of this process if less."""
    return min(limit.bytes for limit in process_limits()) - resident_bytes()


def resident_bytes() -> int:
    """The memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most memory this process has held."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
