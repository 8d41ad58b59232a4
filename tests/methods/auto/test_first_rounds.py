"""Draft lengths in the first rounds of a reply, and pauses while drafts are unaffordable."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.backoff import Backoff
from edgespec.methods.base import Drafter
from edgespec.methods.tree_growth import TreeGrowth
from scripts.simulation import MACHINES, SimulatedMachine, SimulatedModel, Text, Trace, World, make_controller


def widths_of_failing_rounds(machine: SimulatedMachine) -> tuple[list[int], list[float]]:
    """Return widths and allowances of rounds in which a formerly reliable, confident draft is wrong."""
    world = World(machine)
    drafter = make_controller(world)
    sure = np.full(60, 0.99)
    for _ in range(4):
        world.reply(drafter, Text("right", Trace(np.ones(60, np.bool_), sure)))
    widths, might = list[int](), list[float]()
    propose = drafter.propose

    def watched(sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        before = drafter.allowance_seconds
        tree = propose(sampler, acceptance, draft_length)
        if tree.drafted:
            widths.append(tree.width)
            might.append(before)
        return tree

    drafter.propose = watched  # type: ignore[method-assign]
    world.reply(drafter, Text("wrong", Trace(np.zeros(60, np.bool_), sure)))
    return widths, might


@pytest.mark.parametrize("name", ["A100", "2 CPU cores, F16", "M4 Pro"])
def test_a_rejected_first_draft_leaves_allowance_for_another(name: str) -> None:
    machine = next(machine for machine in MACHINES if machine.name == name)
    widths, might = widths_of_failing_rounds(machine)
    cost = (widths[0] - 1) * machine.draft_cost + machine.curve.v(widths[0]) - 1.0
    assert len(widths) >= 2
    assert 0.0 < cost <= 0.5 * might[0] + 1e-9


def test_a_measured_draft_model_writes_more_of_the_first_reply() -> None:
    machine = next(machine for machine in MACHINES if machine.name == "A100")
    text = Text("right", Trace(np.ones(24, np.bool_), np.full(24, 0.99)))

    def passes(world: World) -> int:
        world.reply(make_controller(world), text)
        return world.stats.target_passes

    assert passes(World(machine)) < passes(UnmeasuredWorld(machine))


class UnmeasuredWorld(World):
    """A machine on which the draft model was not measured before the first reply."""

    def model(self, growth: TreeGrowth, simulated: SimulatedModel | None = None) -> Drafter:
        drafter = super().model(growth, simulated)
        drafter.pass_seconds = drafter.prefill_token_seconds = 0.0
        return drafter


@pytest.mark.parametrize(("cost", "paused"), [(0.1, True), (0.001, False)])
def test_unaffordable_drafts_pause_drafting_only_if_looking_is_slow(cost: float, paused: bool) -> None:
    backoff = Backoff()
    for _ in range(64):
        backoff.record_unaffordable_draft(cost)
    assert backoff.is_paused == paused
