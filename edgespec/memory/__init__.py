"""The memory that target, draft and their caches are given."""

from edgespec.memory.budget import (
    Budget,
    available_bytes,
    check_room_to_plan,
    find_budget,
    peak_bytes,
    resident_bytes,
    within_limits,
)
from edgespec.memory.ladder import Choice, Measured, Prefer, StepName, fitted
from edgespec.memory.limits import Limit
from edgespec.memory.plan import Decision, Item, MemoryPlan, items_of

__all__ = [
    "Budget",
    "Choice",
    "Decision",
    "Item",
    "Limit",
    "Measured",
    "MemoryPlan",
    "Prefer",
    "StepName",
    "available_bytes",
    "check_room_to_plan",
    "find_budget",
    "fitted",
    "items_of",
    "peak_bytes",
    "resident_bytes",
    "within_limits",
]
