"""The cost curve is measured once per configuration of a model, and again if its speed has changed.

Numbers of CPU threads are compared with simulated durations and with llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgespec
import edgespec.methods.costs.target_costs as costs
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import loading
from edgespec.bench import tuning as tuning_module
from edgespec.cli.tune import _print
from edgespec.errors import CancelledError
from edgespec.losslessness.cases import read_prompts
from edgespec.methods.costs import target_costs
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import (
    TargetCosts,
    fastest_threads,
    thread_counts,
    use_fastest_threads,
)
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.system.facts import Facts
from tests.tables import table
from tests.tabular import TabularModel

CORES, LOGICAL = 8, 16
SECONDS = {8: 0.10, 16: 0.14, 6: 0.08, 4: 0.11, 3: 0.20}


class Clock:
    """Replaces the measurement with fixed durations of a step, and counts the measured curves."""

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


@pytest.mark.parametrize(
    "options", [LoadOptions(threads=1), LoadOptions(kv_type="q8_0"), LoadOptions(low_bits=True)]
)
def test_each_load_option_has_its_own_curve(clock: Clock, options: LoadOptions) -> None:
    target_curve(table(5), LoadOptions())
    target_curve(table(5), options)
    assert clock.curves == 2


def test_a_curve_is_used_for_about_the_same_number_of_streamed_layers(clock: Clock) -> None:
    """If fewer layers are streamed, the processor rather than the disk determines a wide pass's duration."""
    for layers, curves in ((40, 1), (41, 1), (30, 2), (1, 3), (2, 4), (0, 5), (40, 5)):
        target_curve(table(5), LoadOptions(streamed_layers=layers))
        assert clock.curves == curves


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


class Threaded(TabularModel):
    """A model whose passes take the time that `seconds` gives for their number of threads."""

    def __init__(self, most: int = CORES) -> None:
        super().__init__(np.zeros((4, 4), np.float32))
        self.most = most

    @property
    def threads(self) -> int:
        return self.most

    @property
    def max_threads(self) -> int:
        return self.most

    def set_max_threads(self, threads: int) -> None:
        self.most = threads


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a machine with eight cores. Return the list of measured thread counts."""
    counts: list[int] = []

    def measure(model: Threaded, *_: object, **__: object) -> CostCurve:
        counts.append(model.threads)
        return CostCurve((1,), (SECONDS[model.threads],))

    monkeypatch.setattr(target_costs, "measure_costs", measure)
    monkeypatch.setattr(target_costs, "usable_cores", lambda *, logical=False: LOGICAL if logical else CORES)
    _set_load(monkeypatch, 0.0)
    return counts


def _set_load(monkeypatch: pytest.MonkeyPatch, busy: float) -> None:
    monkeypatch.setattr(target_costs, "CPU_LOAD", SimpleNamespace(busy_cores=lambda: busy))


@pytest.mark.parametrize(
    ("cores", "logical", "counts"),
    [(8, 16, (8, 16, 6, 4, 3)), (10, 10, (10, 8, 5, 3)), (4, 8, (4, 8, 3, 2)), (2, 2, (2,)), (1, 1, ())],
)
def test_counts_to_compare(cores: int, logical: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores, logical) == counts


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({8: 1.0, 4: 0.9}, 4), ({8: 1.0, 4: 0.97}, 8), ({8: 1.0, 16: 0.7, 4: 0.8}, 16), ({8: 1.0}, 8)],
)
def test_the_default_must_be_beaten_clearly(seconds: Mapping[int, float], best: int) -> None:
    assert fastest_threads(seconds, 8) == best


def test_the_fastest_is_used_and_saved(measured: list[int]) -> None:
    first = Threaded()
    assert use_fastest_threads(first, "machine") == SECONDS
    assert first.most == 6
    assert measured.count(6) == 3
    assert measured.count(3) == 1, "a number that is far slower is measured once"
    measured.clear()
    second = Threaded()
    assert use_fastest_threads(second, "machine") == SECONDS
    assert (second.most, measured) == (6, [])
    use_fastest_threads(second, "another machine")
    assert measured
    measured.clear()
    use_fastest_threads(second, "machine", again=True)
    assert measured


def test_a_disturbed_measurement_is_not_used(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    _set_load(monkeypatch, 1.0)
    model = Threaded()
    assert not use_fastest_threads(model, "busy machine")
    assert model.most == CORES
    _set_load(monkeypatch, 0.0)
    measured.clear()
    assert use_fastest_threads(model, "busy machine")
    assert measured


@pytest.mark.parametrize("most", [0, 1])
def test_small_models_and_fixed_numbers_are_left_alone(measured: list[int], most: int) -> None:
    model = Threaded(most)
    assert not use_fastest_threads(model, "machine")
    assert (model.most, measured) == (most, [])


def test_cancelling(measured: list[int]) -> None:
    model = Threaded()
    with pytest.raises(CancelledError):
        use_fastest_threads(model, "unknown machine", lambda *_: False)
    assert (model.most, measured) == (CORES, [])


@pytest.mark.parametrize(("options", "changes"), [({}, True), ({"threads": 3}, False)])
def test_llama_cpp(
    demo_target: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], changes: bool
) -> None:
    monkeypatch.setattr(loading, "default_threads", lambda *_: 4)
    monkeypatch.setattr(target_costs, "usable_cores", lambda **_: 4)
    _set_load(monkeypatch, 0.0)
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=256, **options))
    model.prefill([1, 2, 3])
    seconds = use_fastest_threads(model, "machine")
    assert set(seconds) == ({4, 3, 2} if changes else set())
    assert all(each > 0.0 for each in seconds.values())
    if changes:
        assert model.max_threads == fastest_threads(seconds, 4)
        assert model.length == 0
    else:
        assert model.max_threads == 0
    model.prefill([1, 2, 3])
    assert 1 <= model.threads <= 4
    model.close()


def test_tune_shows_the_numbers(
    demo_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "default_threads", lambda *_: 3)
    for module in (target_costs, tuning_module):
        monkeypatch.setattr(module, "usable_cores", lambda **_: 3)
    _set_load(monkeypatch, 0.0)
    with edgespec.load(str(demo_target), "none", context=256, exactness="off") as runtime:
        assert set(runtime.thread_seconds) == {3, 2}
        tuning = tuning_module.tune(runtime, read_prompts(None)[:1], max_tokens=4)
    _print(tuning)
    shown = capsys.readouterr().out
    assert "THREADS  MS PER TOKEN" in shown
    assert f"{tuning.threads} <-" in shown
