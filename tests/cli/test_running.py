"""How long measuring takes, as it is told while it runs."""

from __future__ import annotations

import io

import pytest

from edgespec.cli.interrupt import Stop
from edgespec.cli.running import RepliesProgress, counted, duration_text
from edgespec.cli.screen import ProgressLine
from tests.cli.test_screen import Terminal

# Description, fraction and time of each progress report.
REPORTS = (
    ("warming up", 0.0, 0.0),
    ("copy", 0.0, 100.0),
    ("copy", 0.0, 105.0),
    ("copy", 0.1, 110.0),
    ("code", 0.3, 120.0),
    ("code", 0.5, 130.0),
)


def report(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, max_seconds: float | None = None
) -> list[str]:
    """Make the reports, and return the descriptions that the progress line shows."""
    said: list[str] = []
    # For a run with a time limit, the clock is first read when the progress bar is created.
    times = iter([0.0] * bool(max_seconds) + [time for *_, time in REPORTS])
    monkeypatch.setattr("edgespec.cli.running.monotonic", lambda: next(times))
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(ProgressLine, "__call__", lambda self, what, fraction: not said.append(what))  # type: ignore[func-returns-value]
    progress = RepliesProgress(Stop(), max_seconds)
    for description, fraction, _ in REPORTS:
        assert progress(description, fraction)
    return said


def test_the_bar_tells_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reply took 10 s, and the next four take 5 s each. The warm-up does not count."""
    assert report(monkeypatch, Terminal()) == [
        f"[{'-' * 20}] warming up",
        f"[{'-' * 20}] copy",
        f"[{'-' * 20}] copy",
        f"[##{'-' * 18}] about 1 min 30 s left, copy",
        f"[{'#' * 6}{'-' * 14}] about 35 s left, code",
        f"[{'#' * 10}{'-' * 10}] about 25 s left, code",
    ]


def test_a_pipe_gets_one_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    report(monkeypatch, stderr)
    assert stderr.getvalue() == "about 1 min 30 s left\n"


def test_a_time_limit_bounds_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    report(monkeypatch, stderr, max_seconds=170.0)
    assert stderr.getvalue() == "about 1 min 0 s left\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (125.0, "2 min 5 s"), (661.0, "11 min"), (7325.0, "2 h 2 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_counts() -> None:
    assert [counted(number, "reply length") for number in (1, 2000)] == [
        "1 reply length",
        "2,000 reply lengths",
    ]
