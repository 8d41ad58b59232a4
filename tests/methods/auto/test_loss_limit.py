"""The loss limit holds whatever is accepted and whatever passes cost, even if the load changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.auto.live_costs import Conditions, LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits, LossTracker, WorstCaseCosts
from edgespec.methods.costs.curve import CostCurve

# A round chosen by an adversary: the current duration of a target step, the maximum and the actual duration
# of a drafting round, the number of emitted tokens, and other time that plain decoding would not have spent.
ROUNDS = st.lists(
    st.tuples(
        st.floats(0.001, 2.0),
        st.floats(0.0, 50.0),
        st.floats(0.0, 1.0),
        st.integers(1, 17),
        st.floats(0.0, 3.0),
        st.booleans(),
    ),
    max_size=120,
)
LIMITS = st.builds(LossLimits, st.floats(0.0, 0.2), st.floats(0.0, 8.0))
BEFORE = Conditions(replies=1, threads=8)
ALLOWANCE_STEPS, LEVEL_STEPS = 1.0, 0.1


def allows(loss_tracker: LossTracker, worst_seconds: float, plain_seconds: float = 1.0) -> bool:
    """Return whether a round may begin that takes at most `worst_seconds` and emits at least one token."""
    return worst_seconds - plain_seconds <= loss_tracker.allowance_seconds(plain_seconds)


@settings(max_examples=150)
@given(ROUNDS, LIMITS, st.floats(0.001, 2.0))
def test_limit_holds_for_any_rounds(
    rounds: list[tuple[float, float, float, int, float, bool]], limits: LossLimits, plain_seconds: float
) -> None:
    loss_tracker = LossTracker(limits)
    spent = 0.0
    tokens = 0
    for _, worst, share, emitted, extra, wants in rounds:
        worst_seconds = (1.0 + worst) * plain_seconds
        extra_seconds = extra * plain_seconds
        if wants and allows(loss_tracker, extra_seconds + worst_seconds, plain_seconds):
            took = extra_seconds + share * worst_seconds
            loss_tracker.record_draft_round(emitted, took, plain_seconds)
            spent, tokens = spent + took, tokens + emitted
        elif allows(loss_tracker, extra_seconds + plain_seconds, plain_seconds):
            loss_tracker.record_target_step(1, extra_seconds)
            spent, tokens = spent + extra_seconds + plain_seconds, tokens + 1
        else:
            loss_tracker.record_target_step(1)
            spent, tokens = spent + plain_seconds, tokens + 1
        bound = ((1.0 + limits.rate) * tokens + limits.steps) * plain_seconds
        assert spent <= bound * (1.0 + 1e-9)
        assert loss_tracker.tokens == tokens


@settings(max_examples=100)
@given(ROUNDS, LIMITS)
def test_limit_holds_while_the_step_duration_drifts(
    rounds: list[tuple[float, float, float, int, float, bool]], limits: LossLimits
) -> None:
    """Extra time over plain decoding never exceeds the limit in terms of the slowest target step."""
    loss_tracker = LossTracker(limits)
    lost, dearest = 0.0, 0.0
    for plain_seconds, worst, share, emitted, _, wants in rounds:
        dearest = max(dearest, plain_seconds)
        worst_seconds = (1.0 + worst) * plain_seconds
        if wants and allows(loss_tracker, worst_seconds, plain_seconds):
            took = share * worst_seconds
            loss_tracker.record_draft_round(emitted, took, plain_seconds)
            lost += took - emitted * plain_seconds
        else:
            loss_tracker.record_target_step(1)
        assert lost <= (limits.rate * loss_tracker.tokens + limits.steps) * dearest + 1e-9


def test_allowance_follows_the_credit() -> None:
    loss_tracker = LossTracker(LossLimits(rate=0.0, steps=2.0))
    assert allows(loss_tracker, 3.0)
    assert not allows(loss_tracker, 3.1)
    loss_tracker.record_draft_round(1, 2.5, 1.0)  # lost a step and a half
    assert allows(loss_tracker, 1.5)
    assert not allows(loss_tracker, 1.6)
    loss_tracker.record_draft_round(4, 1.5, 1.0)  # won two and a half
    assert allows(loss_tracker, 4.0)
    loss_tracker.begin()
    assert loss_tracker.allowance_seconds(1.0) == 2.0


def test_allowance_grows_with_the_tokens() -> None:
    loss_tracker = LossTracker(LossLimits(rate=0.02, steps=0.0))
    assert not allows(loss_tracker, 1.5)
    for _ in range(25):
        loss_tracker.record_target_step(1)
    assert allows(loss_tracker, 1.5)


def test_exploration_budget() -> None:
    loss_tracker = LossTracker(LossLimits(rate=0.02, steps=2.0))
    assert loss_tracker.exploration_seconds(1.0) == 0.0
    loss_tracker.record_target_step(20)
    assert loss_tracker.exploration_seconds(0.5) == pytest.approx(0.03 * 20 * 0.5)
    loss_tracker.record_draft_round(4, 1.0, 0.5)
    assert loss_tracker.exploration_seconds(0.5) == pytest.approx(0.03 * 24 * 0.5 + 1.0)
    assert loss_tracker.exploration_seconds(0.5) < loss_tracker.allowance_seconds(0.5)


def test_draft_rounds_are_counted_per_reply() -> None:
    loss_tracker = LossTracker()
    loss_tracker.record_target_step(1)
    loss_tracker.record_draft_round(3, 1.5, 1.0)
    assert (loss_tracker.draft_rounds, loss_tracker.tokens) == (1, 4)
    loss_tracker.begin()
    assert (loss_tracker.draft_rounds, loss_tracker.tokens) == (0, 0)


def test_speed_up_stays_right_when_target_steps_become_faster() -> None:
    """On a machine that becomes idle, target steps take half as long. Earlier savings keep their value."""
    loss_tracker = LossTracker()
    assert loss_tracker.speed_up(1.0) == 1.0
    for _ in range(10):
        loss_tracker.record_draft_round(4, 1.0, 1.0)
    assert loss_tracker.speed_up(1.0) == pytest.approx(4.0)
    assert loss_tracker.speed_up(0.5) == pytest.approx(4.0)
    loss_tracker.record_target_step(60)
    assert loss_tracker.speed_up(0.5) == pytest.approx(70.0 / 40.0)


@pytest.mark.parametrize(("tokens", "share"), [(50, 0.06), (100, 0.04), (1000, 0.022)])
def test_the_fixed_steps_are_a_larger_share_of_a_short_reply(tokens: int, share: float) -> None:
    """docs/automatic-mode.md and the README state these shares."""
    loss_tracker = LossTracker()
    loss_tracker.record_target_step(tokens)
    assert loss_tracker.max_loss == pytest.approx(share)


def _costs() -> tuple[LiveCosts, WorstCaseCosts]:
    costs = LiveCosts(CostCurve((1, 2, 4), (1.0, 1.5, 1.6)), threads=BEFORE.threads)
    return costs, WorstCaseCosts(costs)


def _change(costs: LiveCosts, worst: WorstCaseCosts, now: Conditions) -> None:
    costs.set_conditions(now)
    worst.change_conditions(costs.target_step_seconds)


def test_a_measured_draft_model_allows_longer_first_drafts() -> None:
    costs, unknown = _costs()
    measured = WorstCaseCosts(costs, pass_seconds=0.05)
    assert measured.model_draft_length(8, ALLOWANCE_STEPS, draft_rounds=2) == 4
    assert unknown.model_draft_length(8, ALLOWANCE_STEPS, draft_rounds=2) == 1


@pytest.mark.parametrize(
    ("now", "is_affordable"), [(Conditions(1, 7), True), (Conditions(2, 8), False), (Conditions(2, 7), False)]
)
def test_another_number_of_threads_does_not_stop_drafting(now: Conditions, is_affordable: bool) -> None:
    costs, worst = _costs()
    assert worst.affordable_length(1, ALLOWANCE_STEPS, LEVEL_STEPS) == 1
    _change(costs, worst, now)
    assert (worst.affordable_length(1, ALLOWANCE_STEPS, LEVEL_STEPS) == 1) == is_affordable


def test_the_worst_case_is_remembered_for_each_number_of_threads() -> None:
    costs, worst = _costs()
    _change(costs, worst, Conditions(1, 7))
    costs.record_pass(2, 4.5)
    slow = worst.extra_pass_seconds(2)
    _change(costs, worst, BEFORE)
    assert worst.extra_pass_seconds(2) < slow
    _change(costs, worst, Conditions(1, 7))
    assert worst.extra_pass_seconds(2) == pytest.approx(slow)


def test_a_bad_worst_case_is_kept_when_the_threads_change() -> None:
    costs, worst = _costs()
    costs.record_pass(2, 4.5)
    slow = worst.extra_pass_seconds(2)
    _change(costs, worst, Conditions(1, 7))
    assert worst.extra_pass_seconds(2) == pytest.approx(slow)
