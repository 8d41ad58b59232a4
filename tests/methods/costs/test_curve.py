"""CostCurve and its measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends import llamacpp, mlx
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, ContextFullError
from edgespec.methods.costs import curve as module
from edgespec.methods.costs.constants import MEASURED_WIDTHS
from edgespec.methods.costs.curve import CostCurve, assumed_cost, measure_costs
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.store.catalogue import models_folder
from tests.tables import table

# 1.1 B parameters, F16, on two cores.
MEASURED = CostCurve((1, 2, 3, 4, 5, 6, 8, 12, 16), (1, 1.27, 1.27, 1.35, 1.48, 1.56, 1.97, 2.29, 2.83))

curves = st.lists(st.floats(0.05, 50), min_size=1, max_size=6).flatmap(
    lambda seconds: st.lists(st.integers(1, 12), min_size=len(seconds) - 1, max_size=len(seconds) - 1).map(
        lambda steps: CostCurve(tuple(np.cumsum([1, *steps]).tolist()), tuple(seconds))
    )
)


class TestCostCurve:
    @given(curves)
    def test_measured_widths_return_their_durations(self, curve: CostCurve) -> None:
        for width, seconds in zip(curve.widths, curve.seconds, strict=True):
            assert curve.v(width) == pytest.approx(seconds / curve.seconds[0])

    @given(curves, st.integers(1, 60))
    def test_linear_between_measured_widths(self, curve: CostCurve, width: int) -> None:
        if len(curve.widths) > 1 and width <= curve.widths[-1]:
            expected = np.interp(width, curve.widths, curve.seconds) / curve.seconds[0]
            assert curve.v(width) == pytest.approx(float(expected))

    def test_last_slope_continues(self) -> None:
        assert MEASURED.v(20) == pytest.approx(2.83 + 0.54)
        assert CostCurve((1, 2, 4), (2.0, 6.0, 4.0)).v(9) == 2.0, "what falls at the end falls no further"
        assert CostCurve((1,), (0.1,)).v(5) == assumed_cost(5), "nothing is known of wider passes"

    @pytest.mark.parametrize(
        ("widths", "seconds"),
        [((), ()), ((2, 3), (1, 1)), ((1, 1), (1, 1)), ((1, 3, 2), (1, 1, 1)), ((1,), (0,)), ((1, 2), (1,))],
    )
    def test_invalid_curves_raise(self, widths: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="speed measurements"):
            CostCurve(widths, seconds)


PROMPT = [3, 1, 4, 1, 5, 2, 6]


@pytest.fixture(params=["table", "llama.cpp", "MLX"])
def model(request: pytest.FixtureRequest, demo_target: Path) -> Iterator[LanguageModel]:
    options = LoadOptions(context_tokens=64, max_branches=4)
    made: LanguageModel
    if request.param == "table":
        made = table(1, context_tokens=64)
    elif request.param == "llama.cpp":
        made = llamacpp.load(str(demo_target), "demo", options)
    else:
        made = mlx.load(str(models_folder() / "demo-mlx-draft"), "demo-mlx-draft", options)
    yield made
    made.close()


def rows(model: LanguageModel) -> Any:
    logits = model.verify(TokenTree.chain(7, [2, 1]))
    read = np.stack([logits.at(row, np.arange(logits.vocab_size)) for row in range(3)])
    model.truncate(model.length)
    return read


class TestMeasureCosts:
    @pytest.mark.long
    @pytest.mark.parametrize("prompt", [[], PROMPT], ids=["empty", "after a prompt"])
    def test_cache_is_unchanged(self, model: LanguageModel, prompt: list[int]) -> None:
        model.prefill(prompt)
        before = rows(model)
        curve = measure_costs(model, (1, 2, 5), repeats=2)
        assert curve.widths == (1, 2, 5)
        assert model.length == len(prompt)
        assert np.array_equal(rows(model), before)

    def test_a_disturbed_pass_is_no_outlier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = {1: 0.1, 2: 0.15, 4: 6.5, 8: 0.4}
        monkeypatch.setattr(module, "_pass_seconds", lambda _model, width: seconds[width])
        measured = measure_costs(table(1, context_tokens=64), widths=(2, 4, 8), repeats=0)
        assert measured.seconds == pytest.approx((0.1, 0.15, 1.2, 0.4))

    @pytest.mark.long
    def test_widths_fit_the_context(self, model: LanguageModel) -> None:
        model.prefill([1] * (model.free_tokens - 5))
        assert measure_costs(model, repeats=1).widths == (1, 2, 3, 4, 5)

    def test_interrupt_leaves_the_cache_unchanged(self, model: LanguageModel) -> None:
        model.prefill(PROMPT)
        model.interrupt(True)
        with pytest.raises(CancelledError):
            measure_costs(model)
        model.interrupt(False)
        assert model.length == len(PROMPT)

    def test_interrupt_between_passes(self) -> None:
        model = table(1)
        counted = iter(range(100))
        whole = model.verify

        def verify(tree: TokenTree, first: int = 0) -> Any:
            if next(counted) == 4:
                model.interrupt(True)
            return whole(tree, first)

        model.verify = verify  # type: ignore[method-assign]
        with pytest.raises(CancelledError):
            measure_costs(model)
        assert next(counted) == 5

    def test_the_tokens_of_a_pass_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Equal tokens would be routed to the same experts."""
        model = table(1, vocab=64)
        chains, whole = {}, model.verify

        def verify(tree: TokenTree, first: int = 0) -> Any:
            chains[tree.width] = tree.tokens
            return whole(tree, first)

        monkeypatch.setattr(model, "verify", verify)
        measure_costs(model, (1, 4, 8), repeats=0)
        assert len(set(chains[8])) > 4
        assert chains[8][:4] == chains[4]
        assert chains[4][:1] == chains[1]

    def test_full_context_raises(self) -> None:
        model = table(1, context_tokens=4)
        model.prefill([1] * 4)
        with pytest.raises(ContextFullError):
            measure_costs(model)

    def test_models_without_rollback_are_timed_at_width_one(self) -> None:
        assert measure_costs(table(1, rollback=False)).widths == (1,)


class Clock:
    """A clock that passes advance: each width costs its share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, list[float]]) -> None:
        self.at = 0.0
        self.widths: list[int] = []
        monkeypatch.setattr(module, "now", lambda: self.at)
        self._model = table(1)
        self._whole = self._model.verify
        self._seconds = seconds
        self._model.verify = self.verify  # type: ignore[method-assign]

    def verify(self, tree: TokenTree, first: int = 0) -> Any:
        self.widths.append(tree.width)
        queue = self._seconds[tree.width]
        self.at += queue.pop(0) if len(queue) > 1 else queue[0]
        logits = self._whole(tree, first)
        return SimpleNamespace(at=logits.at)

    def measure(self, **options: Any) -> CostCurve:
        return measure_costs(self._model, **options)


class TestTimeBudget:
    def test_medians_of_interleaved_repeats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, {1: [9.0, 2.0, 1.0, 3.0], 2: [9.0, 4.0, 6.0, 5.0]})
        curve = clock.measure(widths=(1, 2), repeats=3, budget_seconds=1e9)
        assert curve == CostCurve((1, 2), (2.5, 5.0))
        assert clock.widths == [1, 1, 2, 1, 2, 1, 2, 1, 2]

    def test_narrow_widths_come_first_when_time_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, {width: [0.04 * width] for width in MEASURED_WIDTHS})
        curve = clock.measure(budget_seconds=2.0)
        assert curve.widths == (1, 2, 3, 4, 5, 6, 8)
        assert clock.at < 0.04 + 2.0 + 0.32 + 1e-9
        assert curve.v(4) == pytest.approx(4.0)

    def test_a_slow_target_whose_rows_are_nearly_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step takes half a second, as with a large model on a CPU, where drafting saves the most time."""
        clock = Clock(monkeypatch, {width: [0.55 * (1.0 + 0.02 * (width - 1))] for width in MEASURED_WIDTHS})
        curve = clock.measure(budget_seconds=2.0)
        assert set(curve.widths) >= {1, 2, 4, 8}
        assert curve.v(5) == pytest.approx(1.08)
        assert clock.at < (1 + 12 + 1.2) * 0.55, "a cold step, about twelve more, and what was begun last"

    @pytest.mark.parametrize(("row", "is_timed"), [(0.01, True), (0.5, False)])
    def test_a_wide_pass_is_timed_if_narrow_ones_take_about_as_long(
        self, monkeypatch: pytest.MonkeyPatch, row: float, is_timed: bool
    ) -> None:
        """A target that is read from disk is so slow that only a few passes are timed."""
        clock = Clock(monkeypatch, {width: [5.0 * (1.0 + row * (width - 1))] for width in MEASURED_WIDTHS})
        curve = clock.measure(budget_seconds=2.0)
        assert (16 in curve.widths) == is_timed
        assert max(curve.widths) == (16 if is_timed else 8)

    def test_a_cold_first_pass_is_not_charged_to_the_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(
            monkeypatch, {width: [40.0, 0.01] if width == 1 else [0.01] for width in MEASURED_WIDTHS}
        )
        curve = clock.measure()
        assert curve.target_step_seconds == pytest.approx(0.01)
        assert max(curve.widths) > 64

    @given(step=st.floats(0.001, 60.0), row=st.floats(0.0, 3.0))
    def test_required_widths_are_always_timed(self, step: float, row: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            clock = Clock(patch, {width: [step * (1.0 + row * (width - 1))] for width in MEASURED_WIDTHS})
            curve = clock.measure(budget_seconds=0.0)
        assert set(curve.widths) >= {1, 2, 4, 8}
        assert curve.v(5) == pytest.approx(1.0 + 4 * row)

    def test_only_given_widths_are_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, {1: [7.0, 5.0], 2: [6.0]})
        assert clock.measure(widths=(1, 2), budget_seconds=0.0, repeats=1).widths == (1, 2)
        assert set(clock.widths) == {1, 2}

    def test_target_steps_are_timed_warm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch, {1: [7.0, 5.0]})
        assert clock.measure(widths=(1,), budget_seconds=0.0) == CostCurve((1,), (5.0,))


def test_changes_of_the_width_are_measured_for_models_that_pad_their_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, seen, last, at = {1: 1.0, 2: 1.25, 3: 1.5, 5: 2.0, 9: 3.0, 17: 5.0}, set[int](), 0, 0.0

    def pass_seconds(_model: LanguageModel, width: int) -> float:
        nonlocal last, at
        took = seconds[width] + 0.5 * (width != last) + 4.0 * (width not in seen)
        seen.add(width)
        last, at = width, at + took
        return took

    monkeypatch.setattr(module, "_pass_seconds", pass_seconds)
    monkeypatch.setattr(module, "now", lambda: at)
    model = table(1)
    able = replace(model.facts.capabilities, pass_widths=tuple(seconds), has_slow_width_changes=True)
    model.facts = replace(model.facts, capabilities=able)
    curve = measure_costs(model, budget_seconds=1e9)
    assert curve == CostCurve(tuple(seconds), tuple(seconds.values()), tuple(seconds), 0.5)
    assert [curve.v(width) for width in (1, 3, 4, 6, 9, 10)] == [1.0, 1.5, 2.0, 3.0, 3.0, 5.0]
    assert curve.v(19) == pytest.approx(5.5)
    # The widest pass is measured only if there is time.
    seen.clear()
    curve = measure_costs(model, budget_seconds=0.0)
    assert curve.widths == (1, 2, 3, 5, 9)
    assert curve.padded(10) == 17
    assert curve.v(10) == curve.v(17) > curve.v(9), "a pass of 10 tokens is padded to a width not measured"
