"""The bound holds on every path: whatever is accepted, whatever passes cost, whenever the policy asks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.auto.loss_limit import LossLimit, LossLimits

# A round that an adversary chose: what a plain step takes now; the worst a round that drafts may take, and
# what it took of that; tokens that came out; what else was spent that plain decoding would not have.
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


def allows(loss_limit: LossLimit, worst_seconds: float, plain_seconds: float = 1.0) -> bool:
    """May a round begin that takes at most `worst_seconds`, and emits one token or more?"""
    return worst_seconds - plain_seconds <= loss_limit.allowance_seconds(plain_seconds)


@settings(max_examples=400, deadline=None)
@given(ROUNDS, LIMITS, st.floats(0.001, 2.0))
def test_no_reply_costs_more_than_was_agreed(
    rounds: list[tuple[float, float, float, int, float, bool]], limits: LossLimits, plain_seconds: float
) -> None:
    loss_limit = LossLimit(limits)
    spent = 0.0
    tokens = 0
    for _, worst, share, emitted, extra, wants in rounds:
        worst_seconds = (1.0 + worst) * plain_seconds
        extra_seconds = extra * plain_seconds
        if wants and allows(loss_limit, extra_seconds + worst_seconds, plain_seconds):
            took = extra_seconds + share * worst_seconds
            loss_limit.charge(extra_seconds)
            loss_limit.record_draft_round(emitted, share * worst_seconds, plain_seconds)
            spent, tokens = spent + took, tokens + emitted
        else:
            loss_limit.record_target_step(1)
            spent, tokens = spent + plain_seconds, tokens + 1
        bound = ((1.0 + limits.rate) * tokens + limits.steps) * plain_seconds
        assert spent <= bound * (1.0 + 1e-9)
        assert loss_limit.tokens == tokens


@settings(max_examples=200, deadline=None)
@given(ROUNDS, LIMITS)
def test_where_the_cost_of_a_plain_step_drifts_each_round_is_held_to_its_own(
    rounds: list[tuple[float, float, float, int, float, bool]], limits: LossLimits
) -> None:
    """Time beyond plain decoding never exceeds the allowance at the dearest step there was."""
    loss_limit = LossLimit(limits)
    lost, dearest = 0.0, 0.0
    for plain_seconds, worst, share, emitted, _, wants in rounds:
        dearest = max(dearest, plain_seconds)
        worst_seconds = (1.0 + worst) * plain_seconds
        if wants and allows(loss_limit, worst_seconds, plain_seconds):
            took = share * worst_seconds
            loss_limit.record_draft_round(emitted, took, plain_seconds)
            lost += took - emitted * plain_seconds
        else:
            loss_limit.record_target_step(1)
        assert lost <= (limits.rate * loss_limit.tokens + limits.steps) * dearest + 1e-9


def test_a_round_that_may_lose_more_than_is_left_is_not_begun() -> None:
    loss_limit = LossLimit(LossLimits(rate=0.0, steps=2.0))
    assert allows(loss_limit, 3.0)
    assert not allows(loss_limit, 3.1)
    loss_limit.record_draft_round(1, 2.5, 1.0)  # lost a step and a half
    assert allows(loss_limit, 1.5)
    assert not allows(loss_limit, 1.6)
    loss_limit.record_draft_round(4, 1.5, 1.0)  # won two and a half
    assert allows(loss_limit, 4.0)
    loss_limit.begin()
    assert loss_limit.allowance_seconds(1.0) == 2.0


def test_tokens_earn_what_may_be_lost() -> None:
    loss_limit = LossLimit(LossLimits(rate=0.02, steps=0.0))
    assert not allows(loss_limit, 1.5)
    for _ in range(25):
        loss_limit.record_target_step(1)
    assert allows(loss_limit, 1.5)


def test_tries_take_a_share_of_the_tokens_and_what_was_won() -> None:
    loss_limit = LossLimit(LossLimits(rate=0.02, steps=2.0))
    assert loss_limit.exploration_seconds(1.0) == 0.0
    loss_limit.record_target_step(20)
    assert loss_limit.exploration_seconds(0.5) == pytest.approx(0.03 * 20 * 0.5)
    loss_limit.record_draft_round(4, 1.0, 0.5)
    assert loss_limit.exploration_seconds(0.5) == pytest.approx(0.03 * 24 * 0.5 + 1.0)
    assert loss_limit.exploration_seconds(0.5) < loss_limit.allowance_seconds(0.5)


@pytest.mark.parametrize("limits", [(-0.1, 2.0), (0.1, -1.0), (float("nan"), 2.0)])
def test_terms_make_sense(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LossLimits(*limits)


def test_rounds_that_drafted_are_counted_for_each_reply() -> None:
    loss_limit = LossLimit()
    loss_limit.record_target_step(1)
    loss_limit.record_draft_round(3, 1.5, 1.0)
    assert (loss_limit.draft_rounds, loss_limit.tokens) == (1, 4)
    loss_limit.begin()
    assert (loss_limit.draft_rounds, loss_limit.tokens) == (0, 0)
