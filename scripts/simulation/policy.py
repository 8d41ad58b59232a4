"""The policy of `auto` on a simulated clock, put together as `methods.py` does it for real models."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.auto.combined_drafter import CombinedDrafter
from edgespec.auto.controller import AutoController
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossLimit, LossLimits
from edgespec.costs.curve import CostCurve
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.base import Drafter
from scripts.simulation.world import World

__all__ = ["policy"]


def policy(
    world: World,
    *,
    told: CostCurve | None = None,
    terms: LossLimits | None = None,
    lookup: bool = False,
    replies: Callable[[], int] = lambda: 1,
) -> AutoController:
    """The policy over the world's draft model, and its lookup.

    told: the curve that it believes in at first, the machine's own unless it is lied to. replies: how many
    are being made at once.
    """
    costs, ledger = LiveCosts(told or world.machine.curve), LossLimit(terms)
    growth = AdaptiveTreeGrowth(PassLimits(), costs.v, siblings=1, clock=world.clock)
    drafters: list[Drafter] = [world.model(growth), *([world.lookup()] if lookup else [])]
    combined = CombinedDrafter(
        drafters,
        can_branch=True,
        curve=costs.v,
        may_lose=lambda: ledger.may_lose_seconds(costs.plain_seconds),
        may_try=lambda: ledger.may_try_seconds(costs.plain_seconds),
        clock=world.clock,
    )
    return AutoController(combined, ledger, costs, clock=world.clock, replies=replies)
