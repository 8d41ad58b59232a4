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
TERMS = st.builds(LossLimits, st.floats(0.0, 0.2), st.floats(0.0, 8.0))


def allows(ledger: LossLimit, worst_seconds: float, plain_seconds: float = 1.0) -> bool:
    """May a round begin that takes at most `worst_seconds`, and emits one token or more?"""
    return worst_seconds - plain_seconds <= ledger.may_lose_seconds(plain_seconds)


@settings(max_examples=400, deadline=None)
@given(ROUNDS, TERMS, st.floats(0.001, 2.0))
def test_no_reply_costs_more_than_was_agreed(
    rounds: list[tuple[float, float, float, int, float, bool]], terms: LossLimits, plain_seconds: float
) -> None:
    ledger = LossLimit(terms)
    spent = 0.0
    tokens = 0
    for _, worst, share, emitted, extra, wants in rounds:
        worst_seconds = (1.0 + worst) * plain_seconds
        extra_seconds = extra * plain_seconds
        if wants and allows(ledger, extra_seconds + worst_seconds, plain_seconds):
            took = extra_seconds + share * worst_seconds
            ledger.charge(extra_seconds)
            ledger.drafted(emitted, share * worst_seconds, plain_seconds)
            spent, tokens = spent + took, tokens + emitted
        else:
            ledger.plain(1)
            spent, tokens = spent + plain_seconds, tokens + 1
        bound = ((1.0 + terms.rate) * tokens + terms.steps) * plain_seconds
        assert spent <= bound * (1.0 + 1e-9)
        assert ledger.tokens == tokens


@settings(max_examples=200, deadline=None)
@given(ROUNDS, TERMS)
def test_where_the_cost_of_a_plain_step_drifts_each_round_is_held_to_its_own(
    rounds: list[tuple[float, float, float, int, float, bool]], terms: LossLimits
) -> None:
    """Time beyond plain decoding never exceeds the allowance at the dearest step there was."""
    ledger = LossLimit(terms)
    lost, dearest = 0.0, 0.0
    for plain_seconds, worst, share, emitted, _, wants in rounds:
        dearest = max(dearest, plain_seconds)
        worst_seconds = (1.0 + worst) * plain_seconds
        if wants and allows(ledger, worst_seconds, plain_seconds):
            took = share * worst_seconds
            ledger.drafted(emitted, took, plain_seconds)
            lost += took - emitted * plain_seconds
        else:
            ledger.plain(1)
        assert lost <= (terms.rate * ledger.tokens + terms.steps) * dearest + 1e-9


def test_a_round_that_may_lose_more_than_is_left_is_not_begun() -> None:
    ledger = LossLimit(LossLimits(rate=0.0, steps=2.0))
    assert allows(ledger, 3.0)
    assert not allows(ledger, 3.1)
    ledger.drafted(1, 2.5, 1.0)  # lost a step and a half
    assert allows(ledger, 1.5)
    assert not allows(ledger, 1.6)
    ledger.drafted(4, 1.5, 1.0)  # won two and a half
    assert allows(ledger, 4.0)
    ledger.begin()
    assert ledger.may_lose_seconds(1.0) == 2.0


def test_tokens_earn_what_may_be_lost() -> None:
    ledger = LossLimit(LossLimits(rate=0.02, steps=0.0))
    assert not allows(ledger, 1.5)
    for _ in range(25):
        ledger.plain(1)
    assert allows(ledger, 1.5)


def test_tries_take_a_share_of_the_tokens_and_what_was_won() -> None:
    ledger = LossLimit(LossLimits(rate=0.02, steps=2.0))
    assert ledger.may_try_seconds(1.0) == 0.0
    ledger.plain(20)
    assert ledger.may_try_seconds(0.5) == pytest.approx(0.03 * 20 * 0.5)
    ledger.drafted(4, 1.0, 0.5)
    assert ledger.may_try_seconds(0.5) == pytest.approx(0.03 * 24 * 0.5 + 1.0)
    assert ledger.may_try_seconds(0.5) < ledger.may_lose_seconds(0.5)


@pytest.mark.parametrize("terms", [(-0.1, 2.0), (0.1, -1.0), (float("nan"), 2.0)])
def test_terms_make_sense(terms: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="cannot lose"):
        LossLimits(*terms)


def test_rounds_that_drafted_are_counted_for_each_reply() -> None:
    ledger = LossLimit()
    ledger.plain(1)
    ledger.drafted(3, 1.5, 1.0)
    assert (ledger.rounds, ledger.tokens) == (1, 4)
    ledger.begin()
    assert (ledger.rounds, ledger.tokens) == (0, 0)
