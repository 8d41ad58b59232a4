"""What a reply stakes on its first guesses, and when looking for affordable ones is given up."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.auto.backoff import Backoff
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from scripts.simulation import MACHINES, SimulatedMachine, Text, Trace, World, make_controller


def widths_of_failing_rounds(machine: SimulatedMachine) -> tuple[list[int], list[float]]:
    """A draft that was right is sure and wrong now: rows of its rounds, and what might be lost before."""
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
def test_a_first_guess_that_fails_is_not_the_last(name: str) -> None:
    machine = next(machine for machine in MACHINES if machine.name == name)
    widths, might = widths_of_failing_rounds(machine)
    cost = (widths[0] - 1) * machine.draft_cost + machine.curve.v(widths[0]) - 1.0
    assert len(widths) >= 2
    assert 0.0 < cost <= 0.5 * might[0] + 1e-9


def test_looking_for_what_cannot_be_afforded_is_given_up_where_it_takes_time() -> None:
    backoff = Backoff()
    for _ in range(64):
        backoff.record_unaffordable_draft(0.1)
    assert backoff.is_paused


def test_looking_that_is_as_good_as_free_goes_on() -> None:
    backoff = Backoff()
    for _ in range(64):
        backoff.record_unaffordable_draft(0.001)
    assert not backoff.is_paused
