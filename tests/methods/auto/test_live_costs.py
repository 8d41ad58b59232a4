"""LiveCosts follows the machine and requests target steps when they are needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.methods.auto.live_costs import Conditions, LiveCosts
from edgespec.methods.costs.curve import CostCurve

CURVE = CostCurve((1, 2, 4, 8), (0.1, 0.15, 0.2, 0.4))


def test_initial_costs_are_those_of_the_curve() -> None:
    costs = LiveCosts(CURVE)
    assert costs.target_step_seconds == pytest.approx(0.1)
    assert [costs.v(rows) for rows in (1, 2, 4, 8)] == pytest.approx([1.0, 1.5, 2.0, 4.0])
    assert costs.pass_seconds(8) == pytest.approx(0.4)
    assert not costs.needs_target_step


def test_a_change_of_the_width_is_part_of_the_cost() -> None:
    costs = LiveCosts(CostCurve((1, 2, 3, 5), (0.1, 0.11, 0.12, 0.15), (1, 2, 3, 5), 0.05))
    assert [costs.v(width) for width in (2, 3, 4, 5)] == pytest.approx([1.6, 1.7, 2.0, 2.0])
    costs.record_pass(4, 0.2)
    assert [costs.v(width) for width in (2, 3, 4, 5)] == pytest.approx([1.6, 1.7, 1.5, 1.5])
    assert costs.return_seconds == 0.05
    costs.record_pass(1, 0.15)
    assert costs.target_step_seconds == pytest.approx(0.1)
    assert costs.return_seconds == 0.0
    costs.record_pass(1, 0.1)
    assert costs.target_step_seconds == pytest.approx(0.1)


@given(st.floats(0.3, 3.0))
def test_step_duration_is_followed_within_a_few_steps(factor: float) -> None:
    costs = LiveCosts(CURVE)
    for _ in range(16):
        costs.record_pass(1, 0.1 * factor)
    assert costs.target_step_seconds == pytest.approx(0.1 * factor, rel=0.03)


def test_one_slow_step_has_little_effect() -> None:
    costs = LiveCosts(CURVE)
    costs.record_pass(1, 100.0)
    assert costs.target_step_seconds < 0.2
    for _ in range(12):
        costs.record_pass(1, 0.1)
    assert costs.target_step_seconds == pytest.approx(0.1, rel=0.03)


@given(st.floats(0.5, 2.0))
def test_costs_are_corrected_per_width(factor: float) -> None:
    costs = LiveCosts(CURVE)
    for _ in range(60):
        costs.record_pass(1, 0.1)
        costs.record_pass(4, 0.2 * factor)
    assert costs.v(4) == pytest.approx(2.0 * factor, rel=0.02)


def test_slow_wide_passes_need_one_target_step() -> None:
    costs = LiveCosts(CURVE)
    costs.record_pass(1, 0.1)
    for _ in range(6):
        costs.record_pass(4, 2.0 * costs.curve.seconds[2])
    assert costs.needs_target_step
    costs.record_pass(1, 0.2)
    assert costs.target_step_seconds == pytest.approx(0.2, rel=0.02)
    # The machine became slower, so a pass of four rows costs as many target steps as before.
    assert costs.v(4) == pytest.approx(2.0, rel=0.05)


def test_noise_needs_no_target_step() -> None:
    costs = LiveCosts(CURVE)
    for at in range(200):
        costs.record_pass(4, 0.2 * (1.1 if at % 2 else 0.9))
        assert not costs.needs_target_step


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(0.0, 1e6)), max_size=60))
def test_costs_stay_positive(seen: list[tuple[int, float]]) -> None:
    costs = LiveCosts(CURVE)
    for rows, seconds in seen:
        costs.record_pass(rows, seconds)
        assert costs.target_step_seconds > 0.0
        assert all(costs.v(width) > 0.0 for width in range(1, 20))
        assert costs.v(1) == 1.0


def test_context_buckets_start_from_the_nearest_one() -> None:
    costs = LiveCosts(CURVE)
    for _ in range(16):
        costs.record_pass(1, 0.2)
    costs.set_context_tokens(10_000)
    assert costs.target_step_seconds == pytest.approx(0.2, rel=0.03)
    for _ in range(16):
        costs.record_pass(1, 0.4)
    assert costs.target_step_seconds == pytest.approx(0.4, rel=0.03)
    costs.set_context_tokens(100)
    assert costs.target_step_seconds == pytest.approx(0.2, rel=0.03)


def test_costs_are_restored() -> None:
    costs = LiveCosts(CURVE)
    for _ in range(8):
        costs.record_pass(1, 0.15)
        costs.record_pass(4, 0.4)
    again = LiveCosts(CURVE)
    again.restore_statistics(costs.saved_statistics())
    assert again.target_step_seconds == pytest.approx(costs.target_step_seconds)
    assert [again.v(rows) for rows in range(1, 12)] == pytest.approx([costs.v(rows) for rows in range(1, 12)])


def test_slots_share_what_they_measure() -> None:
    first = LiveCosts(CURVE, shares_passes=True)
    second = first.for_another_slot()
    for costs in (first, second):
        costs.set_conditions(Conditions(replies=2))
    assumed = second.worst_v(2)
    for _ in range(8):
        first.record_pass(1, 0.3, 1)
        first.record_pass(2, 0.6, 2)
    assert second.target_step_seconds == pytest.approx(first.target_step_seconds)
    assert second.v(2) == pytest.approx(first.v(2))
    assert second.worst_v(2) < assumed
    saved = {**first.saved_statistics(), "found": np.array([[0.0, 3.0, 0.0]])}
    second.restore_statistics(saved)
    assert second.target_step_seconds == pytest.approx(first.target_step_seconds)


def test_measurements_soon_replace_the_assumed_worst_case() -> None:
    costs = LiveCosts(CURVE, shares_passes=True)
    costs.set_conditions(Conditions(replies=2))
    worst = []
    for _ in range(6):
        worst.append(costs.worst_v(2) / costs.v(2))
        costs.record_pass(2, costs.pass_seconds(2), 2)
    assert worst[0] == pytest.approx(2.0)
    assert worst[-1] == pytest.approx(1.0)
    # A pass that took much longer is remembered for more than a few passes.
    costs.record_pass(2, 2.0 * costs.pass_seconds(2), 2)
    for _ in range(6):
        costs.record_pass(2, costs.pass_seconds(2), 2)
    assert costs.worst_v(2) / costs.v(2) > 1.5


def test_replies_that_share_passes_count_the_tokens_of_all() -> None:
    costs = LiveCosts(CURVE, shares_passes=True)
    assert costs.v(2) == pytest.approx(1.5)
    costs.set_conditions(Conditions(replies=2))
    # Two replies with two tokens each need a pass over four, instead of one over two.
    assert costs.pass_seconds(1) == pytest.approx(0.15)
    assert costs.v(2) == pytest.approx(0.2 / 0.15)
    costs.set_conditions(Conditions(replies=4))
    assert costs.pass_seconds(1) == pytest.approx(0.2)
    assert costs.v(2) == pytest.approx(2.0)
    assert costs.v(4) == pytest.approx(4.0)


def test_a_shared_pass_is_compared_with_one_of_equal_replies() -> None:
    costs = LiveCosts(CURVE, shares_passes=True)
    costs.set_conditions(Conditions(replies=2))
    assert costs.comparable_seconds(0.3, 2, 2) == pytest.approx(0.3)
    # Another reply verified six tokens, or did not take part.
    assert costs.comparable_seconds(0.4, 2, 6) == pytest.approx(0.2)
    assert costs.comparable_seconds(0.15, 2, 0) == pytest.approx(0.15)


def test_shared_passes_correct_a_wrong_curve() -> None:
    costs = LiveCosts(CostCurve((1, 2, 4, 8), (0.1, 0.15, 0.6, 0.5)), shares_passes=True)
    costs.set_conditions(Conditions(replies=4))
    random = np.random.default_rng(0)
    for _ in range(60):
        widths = random.choice([1, 1, 4], 4)
        total = int(widths.sum())
        costs.record_pass(int(widths[0]), 0.2 * (1 + 0.25 * (total / 4 - 1)), total - int(widths[0]))
    assert costs.pass_seconds(1) == pytest.approx(0.2, rel=0.2)
    assert costs.pass_seconds(4) == pytest.approx(0.35, rel=0.2)
