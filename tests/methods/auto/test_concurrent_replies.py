"""Costs per number of concurrent replies."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.controller import AutoController
from edgespec.methods.auto.live_costs import Conditions, LiveCosts
from edgespec.methods.costs.curve import CostCurve
from scripts.simulation import MACHINES, World, make_controller, stationary

A100 = next(machine for machine in MACHINES if machine.name == "A100")


class TestLiveCostsPerReplyCount:
    """Costs are tracked separately for each number of concurrent replies."""

    def costs(self) -> LiveCosts:
        return LiveCosts(CostCurve((1, 2, 4), (1.0, 1.2, 1.5)))

    def test_a_new_number_of_replies_needs_target_steps(self) -> None:
        costs = self.costs()
        costs.set_conditions(Conditions(2))
        asked = []
        for seconds in (2.0, 2.2, 1.8, 2.0):
            asked.append(costs.needs_target_step)
            costs.record_pass(1, seconds)
        assert asked == [True, True, True, False]
        assert costs.target_step_seconds == pytest.approx(2.0, rel=0.05)
        costs.set_conditions(Conditions(1))
        assert (costs.target_step_seconds, costs.needs_target_step) == (1.0, False)
        costs.set_conditions(Conditions(2))
        assert costs.target_step_seconds == pytest.approx(2.0, rel=0.05)
        assert not costs.needs_target_step

    def test_widths_have_costs_per_number_of_replies(self) -> None:
        costs = self.costs()
        costs.set_conditions(Conditions(3))
        for _ in range(40):
            costs.record_pass(1, 2.0)
            costs.record_pass(4, 8.0)
        assert costs.v(4) == pytest.approx(4.0, rel=0.05)
        costs.set_conditions(Conditions(0))  # nobody counts: it is alone
        assert costs.v(4) == 1.5
        costs.set_context_tokens(5000)
        costs.set_conditions(Conditions(3))
        assert costs.v(4) == pytest.approx(4.0, rel=0.05)

    def test_only_costs_of_single_replies_are_saved(self) -> None:
        costs, other = self.costs(), self.costs()
        costs.record_pass(1, 1.1)
        alone = costs.target_step_seconds
        costs.set_conditions(Conditions(4))
        costs.record_pass(1, 4.0)
        other.set_conditions(Conditions(4))
        other.restore_statistics(costs.saved_statistics())
        assert (other.target_step_seconds, other.conditions) == (alone, Conditions(1))
        other.set_conditions(Conditions(4))
        assert other.needs_target_step

    def test_costs_are_kept_per_number_of_threads(self) -> None:
        costs = LiveCosts(CostCurve((1, 2, 4), (1.0, 1.2, 1.5)), threads=2)
        costs.set_conditions(Conditions(1, threads=1))
        assert costs.needs_target_step
        for _ in range(40):
            costs.record_pass(1, 1.4)
            costs.record_pass(4, 4.2)
        assert costs.v(4) == pytest.approx(3.0, rel=0.05)
        costs.set_conditions(Conditions(1, threads=2))
        assert (costs.target_step_seconds, costs.v(4), costs.needs_target_step) == (1.0, 1.5, False)
        costs.set_conditions(Conditions(1, threads=1))
        assert costs.target_step_seconds == pytest.approx(1.4, rel=0.05)
        saved = LiveCosts(costs.curve, threads=2)
        saved.restore_statistics(costs.saved_statistics())
        assert saved.target_step_seconds == 1.0


@dataclass(frozen=True)
class Round:
    """One round: start, actual and estimated target step duration, round duration, tokens and width."""

    moment: float
    plain: float
    believed: float
    seconds: float
    tokens: int
    rows: int


class Shared(World):
    """A machine shared by several replies. `replies` lists their number from given times on.

    With n replies, a target step takes n times as long, and additional rows of a pass are no longer almost
    free.
    """

    def __init__(self, replies: list[tuple[float, int]]) -> None:
        super().__init__(A100, lambda _: float(self.replies_now()))
        self.schedule = replies
        self.rounds: list[Round] = []
        self.guard: AutoController | None = None
        self._began, self._plain, self._rows = 0.0, 1.0, 1

    def replies_now(self) -> int:
        return [1, *(count for since, count in self.schedule if since <= self.seconds)][-1]

    def pass_cost(self, rows: int) -> float:
        return super().pass_cost(rows) if self.replies_now() == 1 else 1.0 + 0.25 * (rows - 1)

    def verify(self, tree: TokenTree) -> Logits:
        self._plain, self._rows = float(self.replies_now()), tree.width
        return super().verify(tree)

    def commit(self, path: tuple[int, ...]) -> None:
        super().commit(path)
        assert self.guard
        seconds, self._began, began = self.seconds - self._began, self.seconds, self._began
        believed = self.guard.costs.target_step_seconds
        self.rounds.append(Round(began, self._plain, believed, seconds, 1 + len(path), self._rows))


def rounds(
    replies: list[tuple[float, int]], rate: float, length: int = 500, *, told: bool = True
) -> list[Round]:
    """Return a reply's rounds under a load. If `told` is set, the controller knows the reply count."""
    world = Shared(replies)
    world.guard = make_controller(world, count_replies=world.replies_now if told else lambda: 1)
    world.reply(world.guard, stationary(rate, length, 1))
    return world.rounds


BUSY_FOR_A_WHILE = [(60.0, 3), (400.0, 1)]


def test_step_duration_follows_the_load_within_two_rounds() -> None:
    seen = rounds(BUSY_FOR_A_WHILE, 0.7)
    busy = [at for at, each in enumerate(seen) if each.plain == 3.0]
    assert 20 < len(busy) < len(seen) - 40
    settled = seen[busy[0] + 2 : busy[-1]] + seen[busy[-1] + 2 :]
    assert [each.believed for each in settled] == pytest.approx([each.plain for each in settled], rel=0.1)


@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_drafts_are_narrower_under_load_only(rate: float) -> None:
    seen = rounds(BUSY_FOR_A_WHILE, rate)
    before, among, after = (
        fmean(each.rows for each in seen if since <= each.moment < until)
        for since, until in ((0.0, 60.0), (60.0, 400.0), (400.0, 1e9))
    )
    assert among < 0.8 * before
    assert after > 0.9 * before
    back = [each.rows for each in seen if each.moment > 400.0]
    assert fmean(back[:8]) > 0.6 * before


@pytest.mark.parametrize(("rate", "max_ratio"), [(0.5, 1.0), (0.7, 1.0), (0.85, 1.02)])
def test_counting_replies_makes_replies_faster_if_many_drafts_fail(rate: float, max_ratio: float) -> None:
    known, unknown = rounds(BUSY_FOR_A_WHILE, rate), rounds(BUSY_FOR_A_WHILE, rate, told=False)
    assert known[-1].moment < max_ratio * unknown[-1].moment


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(1.0, 400.0), st.integers(1, 6)), max_size=5).map(sorted),
    st.sampled_from([0.05, 0.5, 0.85]),
)
@example([(1.0, 2), (294.0, 3), (356.0, 6)], 0.05)
def test_loss_limit_holds_under_changing_load(replies: list[tuple[float, int]], rate: float) -> None:
    """Slowdown is measured in the slowest target step. A reply that starts mid-pass slows the pass down."""
    lost, tokens, dearest = 0.0, 0, 1.0
    for each in rounds(replies, rate, 200):
        dearest = max(dearest, each.plain)
        lost += each.seconds - each.tokens * each.plain
        tokens += each.tokens
        assert lost <= (0.02 * tokens + 2.0 + 0.5 * len(replies)) * dearest
