"""RoundEstimate, compared with an exhaustive search over all cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.methods.auto.model_selection import RoundEstimate
from edgespec.methods.costs.curve import CostCurve, PassLimits

CURVE = CostCurve((1, 2, 3, 4, 5, 8), (1.0, 1.5, 2.4, 1.7, 2.5, 3.0))
# For each level, the probability that the text is still in the draft. It never increases.
CHANCES = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda chances: sorted(chances, reverse=True))
COSTS = st.floats(0.0, 3.0)


def said_of(chances: list[float], cost: float) -> RoundEstimate:
    return RoundEstimate().with_draft(chances, [1] * len(chances), cost)


@given(CHANCES, COSTS)
def test_speed_is_that_of_the_best_cut(chances: list[float], cost: float) -> None:
    every = [
        (1.0 + sum(chances[:levels])) / (cost + CURVE.v(1 + levels)) for levels in range(len(chances) + 1)
    ]
    assert said_of(chances, cost).speed(CURVE.v) == pytest.approx(max(every))


def test_speed_without_drafts_is_one() -> None:
    assert RoundEstimate().speed(CURVE.v) == pytest.approx(1.0)


@given(CHANCES, COSTS)
def test_a_single_added_draft_is_verified_whole(chances: list[float], cost: float) -> None:
    whole = (1.0 + sum(chances)) / (cost + CURVE.v(1 + len(chances)))
    found = RoundEstimate().speed_with(chances, len(chances), cost, CURVE.v, PassLimits())
    assert found == pytest.approx(whole)


@given(CHANCES, CHANCES, COSTS, COSTS, st.booleans())
def test_speed_with_an_added_draft_is_the_best_over_all_cuts(
    first: list[float], second: list[float], cost: float, more: float, joined: bool
) -> None:
    def either(level: int) -> float:
        low, high = sorted([(first[level : level + 1] or [0.0])[0], (second[level : level + 1] or [0.0])[0]])
        return high + 0.5 * low * (1.0 - high)

    every = []
    for levels in range(len(first) + 1 if joined else 1):
        tokens = 1.0
        for level in range(max(levels, len(second))):
            tokens += either(level) if level < levels else second[level]
        every.append(tokens / (cost + more + CURVE.v(1 + levels + len(second))))
    limits = PassLimits(max_branches=2 if joined else 1)
    found = said_of(first, cost).speed_with(second, len(second), more, CURVE.v, limits)
    assert found == pytest.approx(max(every))


@given(CHANCES, CHANCES, COSTS)
def test_adding_a_draft_lowers_no_reach_probability(
    first: list[float], second: list[float], cost: float
) -> None:
    both = said_of(first, cost).with_draft(second, [1] * len(second), 0.0)
    assert len(both.reach_probs) == max(len(first), len(second))
    for level, chance in enumerate(both.reach_probs):
        alone = [said[level] for said in (first, second) if level < len(said)]
        assert max(alone) - 1e-12 <= chance <= min(sum(alone), 1.0) + 1e-12
