"""Pictures of a report, as text and as non-empty PNG files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.charts import Bar, bar_chart, charts, check_plots, save_plots
from edgespec.bench.figures import BenchReport, figures, oracle_comparisons
from edgespec.bench.runs import MethodConfig
from edgespec.errors import BackendMissingError
from edgespec.methods.costs.curve import CostCurve
from tests.bench.making import row
from tests.raising import raises

WAYS = (MethodConfig("none"), MethodConfig("auto"), MethodConfig("model", 4))
DRAFTED: dict[str, Any] = {
    "drafted_tokens": 6,
    "accepted_tokens": 3,
    "drafted_per_position": [4, 2],
    "accepted_per_position": [2, 1],
}


@pytest.fixture
def made() -> BenchReport:
    rows = tuple(
        row(
            prompt,
            config,
            seconds * (1 + i),
            category=prompt[0],
            temperature=temperature,
            **DRAFTED if config != WAYS[0] else {},
        )
        for i, prompt in enumerate(("a1", "a2", "b1"))
        for temperature in (0.0, 0.8)
        for config, seconds in zip(WAYS, (1.0, 0.5, 2.0), strict=True)
    )
    return BenchReport(
        target="t",
        target_quantisation="F16",
        draft=None,
        acceptance="invariant",
        max_tokens=10,
        repeats=1,
        seed=1,
        planned=len(rows),
        ending="complete",
        error="",
        curve=CostCurve((1, 2, 4, 8), (0.1, 0.12, 0.11, 0.4)),
        peak_memory_bytes=1000,
        figures=tuple(figures(rows, WAYS, equal_tokens=lambda temperature: True)),
        oracle_comparisons=tuple(oracle_comparisons(rows, WAYS)),
        rows=rows,
    )


length = st.floats(0.0, 100.0)


@given(
    st.lists(
        st.tuples(st.text("ab", max_size=6), st.lists(length, max_size=4), st.text("x", max_size=5)),
        max_size=5,
    ),
    st.integers(40, 120),
)
def test_bars_fit_and_are_as_long_as_they_say(found: list[tuple[str, list[float], str]], width: int) -> None:
    bars = [Bar(label, tuple(zip(parts, "#=+-", strict=False)), says) for label, parts, says in found]
    title, *lines = bar_chart("title", bars, width)
    assert title == "title"
    assert len(lines) == len(bars)
    assert all(len(line) <= width for line in lines)
    longest = max((sum(parts) for _, parts, _ in found), default=0.0)
    room = width - 2 - max((len(f[0]) for f in found), default=0) - max((len(f[2]) for f in found), default=0)
    for line, (_, parts, _) in zip(lines, found, strict=True):
        drawn = sum(line.count(character) for character in "#=+-")
        assert drawn == pytest.approx(sum(parts) / (longest or 1.0) * room, abs=0.51)


def test_a_full_bar_may_be_longer_than_any() -> None:
    (_, line) = bar_chart("", [Bar("a", ((0.5, "#"),), "x")], 43, full=1.0)
    assert line == "a " + "#" * 20 + " x"


def test_every_picture_is_drawn_in_the_terminal(made: BenchReport) -> None:
    lines = charts(made, 72)
    assert all(len(line) <= 72 for line in lines if "(" not in line)  # but for the legends
    text = "\n".join(lines)
    for temperature in ("temperature 0", "temperature 0.8"):
        for title in ("speed-up over plain decoding", "accepted draft tokens", "time per token"):
            assert any(line.startswith(title) and line.endswith(temperature) for line in lines)
    assert "2.00x" in text
    assert "50%" in text
    assert lines[-4:][0].startswith("1 ")
    assert lines[-1].endswith(" 4.00")


def test_every_plot_is_a_picture_with_something_in_it(made: BenchReport, tmp_path: Path) -> None:
    from matplotlib.image import imread

    folder = tmp_path / "new" / "folder"
    files = save_plots(made, folder)
    assert [file.name for file in files] == ["speed.png", "acceptance.png", "phases.png", "passes.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pixels = imread(file)[..., :3]
        assert pixels.shape[0] > 400
        assert pixels.shape[1] > 800
        colours = {tuple(colour) for colour in pixels[::5, ::5].reshape(-1, 3).round(1).tolist()}
        assert len(colours) > 3  # more than axes on paper
    again = save_plots(made, folder)
    assert again == files


def test_a_report_with_nothing_in_it_is_drawn_too(made: BenchReport, tmp_path: Path) -> None:
    empty = replace(made, figures=(), oracle_comparisons=(), rows=())
    assert len(save_plots(empty, tmp_path)) == 1
    assert charts(empty, 72)[0].startswith("time to check several tokens at once")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plots()
    monkeypatch.setattr("edgespec.bench.charts.find_spec", lambda name: None)
    with raises(BackendMissingError, "scripts/setup dev"):
        check_plots()
