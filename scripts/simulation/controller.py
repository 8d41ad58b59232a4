"""The controller of `auto` on a simulated clock, assembled as in `decode/drafter_set.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.auto.controller import AutoController
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits, LossTracker
from edgespec.methods.base import Drafter
from edgespec.methods.costs.curve import CostCurve, PassLimits
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from scripts.simulation.world import SimulatedModel, World


def make_controller(
    world: World,
    *,
    initial_curve: CostCurve | None = None,
    limits: LossLimits | None = None,
    lookup: bool = False,
    others: Sequence[SimulatedModel] = (),
    count_replies: Callable[[], int] = lambda: 1,
) -> AutoController:
    """Return a controller for the simulated draft model and further drafters.

    Args:
        world: The machine.
        initial_curve: The cost curve with which the controller starts. Defaults to the machine's own.
        limits: The loss limits.
        lookup: Whether there is a lookup drafter.
        others: Further draft models and heads.
        count_replies: See `AutoController`.
    """
    costs, loss_tracker = LiveCosts(initial_curve or world.machine.curve), LossTracker(limits)

    def growth(pass_cost: float) -> AdaptiveTreeGrowth:
        return AdaptiveTreeGrowth(
            PassLimits(), costs.v, siblings=1, initial_pass_cost=pass_cost, clock=world.clock
        )

    drafters: list[Drafter] = [
        *(world.model(growth(other.draft_cost), other) for other in others),
        world.model(growth(world.draft_cost())),
        *([world.lookup()] if lookup else []),
    ]
    combined = CombinedDrafter(
        drafters,
        v=costs.v,
        allowance_seconds=lambda: loss_tracker.allowance_seconds(costs.target_step_seconds),
        exploration_seconds=lambda: loss_tracker.exploration_seconds(costs.target_step_seconds),
        clock=world.clock,
    )
    return AutoController(combined, loss_tracker, costs, clock=world.clock, count_replies=count_replies)
