"""Worst-case costs after a change of the machine's load."""

from __future__ import annotations

import pytest

from edgespec.methods.auto.live_costs import Conditions, LiveCosts
from edgespec.methods.auto.loss_limit import WorstCaseCosts
from edgespec.methods.costs.curve import CostCurve

BEFORE = Conditions(replies=1, threads=8)
ALLOWANCE_STEPS, LEVEL_STEPS = 1.0, 0.1


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
