"""What goes to the terminal, what into a pipe, and how long measuring takes, as it is told while it runs."""

from __future__ import annotations

import io
import re

import pytest

from edgespec.cli import screen
from edgespec.cli.interrupt import Stop
from edgespec.cli.running import RepliesProgress, counted, duration_text
from edgespec.cli.screen import ProgressLine


class Terminal(io.StringIO):
    """A terminal to write to."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [100.0]
    monkeypatch.setattr("edgespec.cli.screen.time.monotonic", lambda: now[0])
    return now


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b]0;title\x07b\rc\td\ne\x9bf😀\u202e\u2066\u2028"
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    screen.write_text(hostile)
    assert terminal.getvalue() == "a]0;titlebc\td\nef😀"
    monkeypatch.setattr("sys.stdout", pipe)
    screen.write_text(hostile)
    assert pipe.getvalue() == hostile


def test_progress_on_a_terminal_is_one_line_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = screen.ProgressLine(Stop())
    assert progress("loading big", 0.1)
    assert terminal.getvalue() == "", "nothing flickers for what is quick"
    clock[0] += 1
    assert progress("loading big", 0.5)
    progress.clear()
    assert terminal.getvalue() == "\r\x1b[Kloading big: 50%\r\x1b[K"


def test_progress_in_a_pipe_is_one_line_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    progress = screen.ProgressLine(Stop())
    for fraction in range(100):
        progress("downloading big (37.3 GiB)", fraction / 100)
        clock[0] += 1
    assert pipe.getvalue() == "downloading big (37.3 GiB)\n"
    silent = screen.ProgressLine(Stop(), in_pipe=False)
    for fraction in range(100):
        silent("reading the prompt", fraction / 100)
        clock[0] += 1
    assert pipe.getvalue() == "downloading big (37.3 GiB)\n"


def test_progress_passes_a_stop_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    progress = screen.ProgressLine(stop)
    assert progress("loading", 0.0)
    stop.request()
    assert not progress("loading", 0.0)


def test_on_a_terminal_what_is_typed_stays_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    screen.print_table(("NAME", "ALSO", "DRAFT"), [("mistral-small-24b-mlx", "a" * 25, "d" * 25)])
    screen.print_table(("NAME", "ALSO"), [("n" * 90, "here")])
    said = terminal.getvalue()
    assert "mistral-small-24b-mlx" in said
    assert said.count("n" * 20) >= 1
    assert "here" in said, "a name of any length leaves room"


def test_a_table_in_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_table(("NAME", "WHAT"), [("a" * 90, "[bold]b" * 20), ("c", "d\x1b[1m")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "[bold]b" * 20 in lines[1]
    assert "\x1b" not in lines[2]


def test_a_cell_is_one_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_table(("NAME", "WHERE"), [("a\nb\u2028c\x1b[2Jd", "here")])
    assert capsys.readouterr().out.splitlines()[1].split("  ") == ["a b c[2Jd", "here"]


@pytest.mark.parametrize(
    ("columns", "heads"), [(60, "NAME FORMAT PLACE"), (30, "NAME PLACE"), (20, "NAME"), (8, "NAME")]
)
def test_a_narrow_terminal_leaves_out_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int, heads: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    screen.print_table(
        ("NAME", "FORMAT", "PLACE"), [("n" * 12, "gguf", "p" * 12)], optional=("FORMAT", "PLACE")
    )
    assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue().splitlines()[0]).split() == heads.split()


def test_a_pipe_gets_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    screen.print_table(("NAME", "FORMAT"), [("n" * 12, "gguf")], optional=("FORMAT",))
    assert pipe.getvalue().split() == ["NAME", "FORMAT", "n" * 12, "gguf"]


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
