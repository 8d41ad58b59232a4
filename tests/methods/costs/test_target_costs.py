"""The cost curve is measured once per way of running a model, and again when its speed has changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import edgespec.methods.costs.target_costs as costs
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import TargetCosts
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.system.facts import Facts
from tests.tables import table


class Clock:
    """Stands in for the measurement: what a step takes is said, and how often a whole curve was taken."""

    def __init__(self) -> None:
        self.step_seconds = 0.1
        self.curves = 0

    def __call__(
        self,
        model: LanguageModel,
        widths: Sequence[int] = (2, 4),
        repeats: int = 5,
        budget_seconds: float = 2,
        progress: Progress | None = None,
    ) -> CostCurve:
        assert model.length == 0
        if progress:
            progress("measuring the speed of the model", 0.0)
        if not widths:
            return CostCurve((1,), (self.step_seconds,))
        self.curves += 1
        return CostCurve((1, 2, 4), tuple(self.step_seconds * v for v in (1.0, 1.25, 1.5)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    clock = Clock()
    monkeypatch.setattr(costs, "measure_costs", clock)
    return clock


def target_curve(
    model: LanguageModel, options: LoadOptions, progress: Progress | None = None
) -> tuple[CostCurve, str]:
    """As a load asks for it: the curve, and what went wrong."""
    known = TargetCosts(model, options)
    return known.curve(progress), known.notice


def test_a_curve_is_measured_once(clock: Clock) -> None:
    model = table(5)
    model.prefill([1, 2, 3])
    first = target_curve(model, LoadOptions())
    assert (target_curve(model, LoadOptions()), clock.curves) == (first, 1)
    assert first[0].v(4) == pytest.approx(1.5)
    assert first[1] == ""
    assert model.length == 0


@pytest.mark.parametrize("options", [LoadOptions(threads=1), LoadOptions(kv_type="q8_0")])
def test_each_load_option_has_its_own_curve(clock: Clock, options: LoadOptions) -> None:
    target_curve(table(5), LoadOptions())
    target_curve(table(5), options)
    assert clock.curves == 2


@pytest.mark.parametrize(("now_seconds", "curves"), [(0.15, 1), (0.07, 1), (0.3, 2), (0.02, 2)])
def test_a_changed_speed_is_measured_again(clock: Clock, now_seconds: float, curves: int) -> None:
    target_curve(table(5), LoadOptions())
    clock.step_seconds = now_seconds
    curve, _ = target_curve(table(5), LoadOptions())
    assert clock.curves == curves
    assert curve.target_step_seconds == (now_seconds if curves == 2 else 0.1)


def test_without_measuring_the_saved_or_an_assumed_curve_is_used(clock: Clock) -> None:
    model = table(5)
    assumed = TargetCosts(model, LoadOptions(), is_measuring=False).curve()
    assert (clock.curves, model.length) == (0, 0)
    assert assumed.v(5) == pytest.approx(1.2)
    target_curve(model, LoadOptions())
    assert TargetCosts(model, LoadOptions(), is_measuring=False).curve().v(4) == pytest.approx(1.5)
    assert clock.curves == 1


@pytest.mark.parametrize(
    "damaged", [[], {}, {"widths": [1, 2], "seconds": [0.1]}, {"widths": 1, "seconds": "a"}]
)
def test_a_damaged_curve_is_measured_again(clock: Clock, damaged: object) -> None:
    kept, _ = target_curve(table(5), LoadOptions())
    Facts().put("costs", {TargetCosts(table(5), LoadOptions())._key(): damaged})
    assert target_curve(table(5), LoadOptions()) == (kept, "")
    target_curve(table(5), LoadOptions())
    assert clock.curves == 2


def test_progress_is_called_before_measuring(clock: Clock) -> None:
    said: list[str] = []

    def progress(what: str, _fraction: float) -> bool:
        said.append(what)
        return True

    for _ in range(2):
        target_curve(table(5), LoadOptions(), progress)
    assert said == ["measuring the speed of the model"]


def test_remeasure(clock: Clock) -> None:
    target_curve(table(5), LoadOptions())
    clock.step_seconds = 0.09
    assert TargetCosts(table(5), LoadOptions()).remeasure().target_step_seconds == 0.09
    assert target_curve(table(5), LoadOptions())[0].target_step_seconds == 0.09
    assert clock.curves == 2
