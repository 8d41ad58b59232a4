"""A context longer than the usual one, wherever nothing else is given up for it."""

from __future__ import annotations

from dataclasses import replace

from edgespec.assembly.pair_estimate import PairEstimator
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.memory import Budget, MemoryPlan, PlanChoice
from edgespec.memory.context_resize import has_room_to_resize
from edgespec.memory.prefix_cache import max_copy_bytes

__all__ = ["longest"]


def longest(
    choice: PlanChoice, plan: MemoryPlan, models: PairEstimator, budget: Budget
) -> tuple[PlanChoice, MemoryPlan]:
    """The choice, and its plan, with the longest context that leaves everything else as it is.

    That is what target and draft were trained for, or a power of two. plan: of `choice`, for which nothing
    was given up, with what kept texts may take.
    """
    for tokens in _lengths(choice, models):
        longer = replace(choice, context_tokens=tokens)
        try:
            tried = models.plan(longer, budget)
        except (OptionError, MemoryBudgetError):
            continue
        kept = (item for item in plan.items if item.kind == "kept")
        tried = replace(tried, items=(*tried.items, *kept))
        if _takes_nothing(tried, plan):
            return longer, tried
    return choice, plan


def _lengths(choice: PlanChoice, models: PairEstimator) -> list[int]:
    """Contexts to try, the longest first."""
    most = min(models.target.trained_context_tokens, models.draft_sees(choice))
    powers = (1 << exponent for exponent in reversed(range(most.bit_length())))
    return [tokens for tokens in dict.fromkeys((most, *powers)) if tokens > choice.context_tokens]


def _takes_nothing(longer: MemoryPlan, plan: MemoryPlan) -> bool:
    """Whether a plan with a longer context gives up nothing of another.

    Texts of the shorter context are kept as they were: their copies find as much room.
    """
    texts = sum(item.bytes for item in plan.items if (item.role, item.kind) == ("target", "cache"))
    copied = min(_copied_bytes(plan), texts) if plan.prefix_cache_bytes else 0
    return (
        longer.fits
        and longer.kv_type == plan.kv_type
        and has_room_to_resize(longer)
        and _copied_bytes(longer) >= copied
    )


def _copied_bytes(plan: MemoryPlan) -> int:
    """What one copy of a text may take."""
    return max_copy_bytes(plan.free_bytes("memory") + plan.prefix_cache_bytes)
