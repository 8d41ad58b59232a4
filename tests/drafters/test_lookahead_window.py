"""The best window of lookahead decoding that fits is chosen, or none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve
from edgespec.drafters.lookahead_window import (
    HitRate,
    LookaheadWindow,
    choose_window,
    expected_speed_up,
    smallest_window,
)

FLAT = CostCurve((1, 64), (1.0, 1.0))


def test_rows_leaves_and_depth() -> None:
    window = LookaheadWindow(5, 4, 3)
    assert (window.levels, window.rows, window.leaves, window.depth) == (3, 25, 8, 7)
    assert LookaheadWindow(5, 2, 3).leaves == 4, "with one level, the columns form a chain"
    chain = LookaheadWindow(0, 4, 1)
    assert (chain.rows, chain.leaves, chain.depth) == (4, 1, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.2, 4), min_size=4, max_size=4),
    st.booleans(),
    st.integers(1, 80),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_the_best_fitting_window_is_chosen(
    seconds: list[float], tree: bool, max_width: int, max_branches: int, draft_length: int
) -> None:
    curve = CostCurve((1, 8, 16, 40), (1.0, *seconds[1:]))
    able = Capabilities(True, tree, "", max_width, max_branches)
    hit_rate = HitRate()
    shapes = (
        [LookaheadWindow(w, n, g) for w in range(2, 17) for n in range(3, 7) for g in range(1, w + 1)]
        if tree
        else [LookaheadWindow(0, n, 1) for n in range(3, 7)]
    )
    shapes = [
        s
        for s in shapes
        if s.rows <= max_width and s.depth <= draft_length and (not tree or s.leaves <= max_branches)
    ]
    best = max((expected_speed_up(curve, s, hit_rate) for s in shapes), default=0.0)
    chosen = choose_window(curve, able, draft_length, hit_rate)
    if best <= 1:
        assert chosen is None
    else:
        assert chosen in shapes
        assert expected_speed_up(curve, chosen, hit_rate) == best


def test_no_window_if_each_row_costs_a_target_step() -> None:
    for tree in (True, False):
        able = Capabilities(True, tree)
        assert choose_window(CostCurve((1, 2), (1.0, 2.0)), able, 16, HitRate()) is None
        assert choose_window(FLAT, able, 16, HitRate()) is not None
        assert choose_window(FLAT, able, smallest_window(able).depth - 1, HitRate()) is None


def test_the_hit_rate_follows_observations() -> None:
    window, hit_rate = LookaheadWindow(4, 3, 4), HitRate()
    assert hit_rate.expected_tokens(window) == pytest.approx((1 - 0.6**4 + 1 - (1 - 0.16) ** 4) / 3)
    for _ in range(300):
        hit_rate.record(window, 2)
    assert hit_rate.expected_tokens(window) == pytest.approx(2.0, rel=0.02)
    for _ in range(600):
        hit_rate.record(window, 0)
    assert hit_rate.expected_tokens(window) < 0.01
