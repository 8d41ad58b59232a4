"""Statistics are restored in a later run, and damaged ones are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.auto.acceptance_stats import AcceptanceStats
from edgespec.auto.backoff import Backoff
from edgespec.auto.combined_drafter import CombinedDrafter
from edgespec.auto.controller import AutoController
from edgespec.auto.drafter_stats import DrafterStats
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossTracker
from edgespec.auto.retry_schedule import RetrySchedule
from edgespec.costs.curve import CostCurve
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.running_stats import AcceptanceCounts, RunningMean
from edgespec.engine.tree import TokenTree
from edgespec.saved_arrays import SavedArrays
from scripts.simulation import MACHINES, World, stationary

CHAIN = TokenTree.chain(9, [1, 2, 3])


class Memory(SavedArrays):
    """Saved arrays in memory."""

    notice = ""

    def __init__(self) -> None:
        self.values: dict[str, NDArray[Any]] = {}

    def load(self) -> Mapping[str, NDArray[Any]]:
        return dict(self.values)

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        self.values = {name: np.array(value) for name, value in values.items()}


def make_controller(world: World, notes: Memory) -> AutoController:
    """Return a controller of the draft model."""
    costs, loss_tracker = LiveCosts(world.machine.curve), LossTracker()
    growth = AdaptiveTreeGrowth(v=costs.v, siblings=1, clock=world.clock)
    drafter = world.model(growth)
    combined = CombinedDrafter([drafter], v=costs.v, clock=world.clock)
    return AutoController(combined, loss_tracker, costs, store=notes, clock=world.clock)


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_a_later_run_starts_from_the_statistics(rate: float) -> None:
    """Useful drafters draft at once, and useless ones cost nothing again."""
    notes, trace = Memory(), stationary(rate, 120, 0)
    first, again = World(MACHINES[0]), World(MACHINES[0])
    one = make_controller(first, notes)
    cold = first.reply(one, trace)
    one.save_statistics()
    warm = again.reply(make_controller(again, notes), trace)
    fresh = World(MACHINES[0])
    assert cold == fresh.reply(make_controller(fresh, Memory()), trace)
    assert warm <= cold if rate > 0.5 else warm <= 1.02 * 120 + 2.0


@pytest.mark.parametrize("kept", ["record", "reading", "found", "patience.rest", "plain"])
def test_damaged_statistics_are_measured_again(kept: str) -> None:
    notes, trace = Memory(), stationary(0.9, 120, 0)
    world = World(MACHINES[0])
    drafter = make_controller(world, notes)
    world.reply(drafter, trace)
    drafter.save_statistics()
    name = next(name for name in notes.values if kept in name)
    notes.values[name] = -1.0 - np.abs(notes.values[name])
    again = World(MACHINES[0])
    drafter = make_controller(again, notes)
    assert "measured again" in drafter.note()
    again.reply(drafter, trace)


def test_acceptance_stats_round_trip() -> None:
    record, other = AcceptanceStats(is_lookup=True), AcceptanceStats(is_lookup=True)
    for tokens in ([1, 2, 3, 4], [1, 5], [7]):
        record.record_draft(CHAIN, 0.25)
        record.record_outcome(CHAIN, tokens)
    other.restore_statistics(record.saved_statistics())
    assert other.saved_statistics().keys() == record.saved_statistics().keys()
    for name, value in record.saved_statistics().items():
        assert np.array_equal(other.saved_statistics()[name], value)


def test_backoff_round_trip() -> None:
    one, other = Backoff(), Backoff()
    for _ in range(20):
        one.record_empty_draft(0.3)
    assert (one.is_paused, other.is_paused) == (True, False)
    other.restore_statistics(one.saved_statistics())
    assert other.is_paused
    assert other.gain == pytest.approx(-0.3)


def test_impossible_values_raise() -> None:
    tally = AcceptanceCounts(np.ones(2), np.full(2, 2.0))
    for wrong in (np.zeros((3, 2)), np.full((4, 2), np.nan), np.array([[2.0, 2.0], [1.0, 1.0]] * 2)):
        with pytest.raises(ValueError, match="counts"):
            tally.restore(wrong)
    for wrong in (np.array([1.0, -2.0]), np.array([1.0, np.inf]), np.zeros(3), np.array(1.0)):
        with pytest.raises(ValueError, match="finite mean"):
            RunningMean().restore(wrong)
    for wrong in (np.array([1.0]), np.array([np.inf]), np.zeros(0), np.array(8)):
        with pytest.raises(ValueError, match="saved interval"):
            RetrySchedule().restore(wrong)
    costs = LiveCosts(CostCurve((1, 2), (1.0, 1.5)))
    for plain in (-1.0, 1e-9, np.inf):
        with pytest.raises(ValueError, match="invalid saved cost"):
            costs.restore_statistics({"found": np.array([[0.0, plain, 0.0]]), "extra": np.zeros((0, 3))})


def test_retry_schedules_of_text_kinds_are_independent() -> None:
    member = DrafterStats(World(MACHINES[0]).lookup())
    member.select_text_kind("talk")
    for _ in range(60):
        member.retries.is_due(1.0)
    rare = member.retries.saved()
    member.select_text_kind("code")
    for _ in range(8):
        member.retries.shorten()
    member.select_text_kind("talk")
    assert (member.retries.saved() == rare).all()
    other = DrafterStats(World(MACHINES[0]).lookup())
    other.restore_statistics(member.saved_statistics())
    other.select_text_kind("talk")
    assert (other.retries.saved() == rare).all()
