"""Statistics are restored in a later run, and damaged ones are ignored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.backoff import Backoff, RetrySchedule
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.auto.controller import AutoController
from edgespec.methods.auto.drafter_stats import AcceptanceStats, DrafterStats
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossTracker
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.running_stats import AcceptanceCounts, RunningMean
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from edgespec.system.facts import Facts
from scripts.simulation import MACHINES, World, stationary

CHAIN = TokenTree.chain(9, [1, 2, 3])


@pytest.fixture(autouse=True)
def own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))


def make_controller(world: World, key: str = "key") -> AutoController:
    """Return a controller of the draft model."""
    costs, loss_tracker = LiveCosts(world.machine.curve), LossTracker()
    growth = AdaptiveTreeGrowth(v=costs.v, siblings=1, clock=world.clock)
    drafter = world.model(growth)
    combined = CombinedDrafter([drafter], v=costs.v, clock=world.clock)
    return AutoController(combined, loss_tracker, costs, statistics_key=key, clock=world.clock)


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_a_later_run_starts_from_the_statistics(rate: float) -> None:
    """Useful drafters draft immediately, and useless ones cost nothing again."""
    trace = stationary(rate, 120, 0)
    first, again = World(MACHINES[0]), World(MACHINES[0])
    one = make_controller(first)
    cold = first.reply(one, trace)
    one.save_statistics()
    warm = again.reply(make_controller(again), trace)
    fresh = World(MACHINES[0])
    assert cold == fresh.reply(make_controller(fresh, "another key"), trace)
    assert warm <= cold if rate > 0.5 else warm <= 1.02 * 120 + 2.0


@pytest.mark.parametrize("kept", ["record", "reading", "found", "patience.rest", "plain"])
def test_damaged_statistics_are_measured_again(kept: str) -> None:
    trace = stationary(0.9, 120, 0)
    world = World(MACHINES[0])
    drafter = make_controller(world)
    world.reply(drafter, trace)
    drafter.save_statistics()
    saved = Facts().get("drafting", "key")
    name = next(name for name in saved if kept in name)
    saved[name] = (-1.0 - np.abs(saved[name])).tolist()
    Facts().put("drafting", {"key": saved})
    again = World(MACHINES[0])
    drafter = make_controller(again)
    assert "will collect them again" in drafter.note()
    again.reply(drafter, trace)


@pytest.mark.parametrize(
    "saved", [[], {}, {"plain": None}, {"plain": [1, [2]]}, {"found": [1e400], "extra": []}]
)
def test_statistics_of_another_form_are_measured_again(saved: object) -> None:
    Facts().put("drafting", {"key": saved})
    assert "will collect them again" in make_controller(World(MACHINES[0])).note()


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
        with pytest.raises(ValueError, match="statistics are damaged"):
            tally.restore(wrong)
    for wrong in (np.array([1.0, -2.0]), np.array([1.0, np.inf]), np.zeros(3), np.array(1.0)):
        with pytest.raises(ValueError, match="finite mean"):
            RunningMean().restore(wrong)
    for wrong in (np.array([1.0]), np.array([np.inf]), np.zeros(0), np.array(8)):
        with pytest.raises(ValueError, match="interval"):
            RetrySchedule().restore(wrong)
    costs = LiveCosts(CostCurve((1, 2), (1.0, 1.5)))
    for plain in (-1.0, 1e-9, np.inf):
        with pytest.raises(ValueError, match="invalid .*cost"):
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
