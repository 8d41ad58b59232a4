"""Memory management: determine the memory budget, plan what to load, and cache prefixes."""

from edgespec.memory.budget import (
    Budget,
    Limit,
    address_limit,
    available_bytes,
    check_room_to_plan,
    find_budget,
    peak_bytes,
    resident_bytes,
)
from edgespec.memory.fitting import PlanChoice, PlanOption, Preference, fit_to_budget, stream_least
from edgespec.memory.plan import Decision, Item, MemoryPlan, Streaming, create_items, shared_items

__all__ = [
    "Budget",
    "Decision",
    "Item",
    "Limit",
    "MemoryPlan",
    "PlanChoice",
    "PlanOption",
    "Preference",
    "Streaming",
    "address_limit",
    "available_bytes",
    "check_room_to_plan",
    "create_items",
    "find_budget",
    "fit_to_budget",
    "peak_bytes",
    "resident_bytes",
    "shared_items",
    "stream_least",
]
