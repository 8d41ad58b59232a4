"""Print results to stdout and everything else to stderr, with colours only on terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from edgespec.cli.interrupt import Stop

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "ProgressLine",
    "line_of",
    "note",
    "print_json",
    "print_table",
    "printable",
    "terminal_width",
    "warn",
    "write_text",
]

# Matches control characters, and characters that change the text direction and can disguise a file name.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_CLEAR_LINE = "\r\x1b[K"
# Seconds before a progress line appears on a terminal.
_TERMINAL_DELAY_SECONDS = 0.3
# Seconds before a progress line is printed if stderr is not a terminal.
_PIPE_DELAY_SECONDS = 5.0


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is an interactive terminal."""
    return stream is not None and stream.isatty()


def terminal_width() -> int | None:
    """Return the width of the terminal in columns, or None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def printable(text: str) -> str:
    """Remove control characters, so that untrusted text cannot control the terminal."""
    return _CONTROLS.sub("", text)


def line_of(text: str) -> str:
    """Collapse text to a single printable line."""
    return printable(" ".join(text.splitlines()))


def write_text(text: str) -> None:
    """Write to stdout and flush. Control characters are removed only on a terminal."""
    sys.stdout.write(printable(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def print_json(value: Mapping[str, object]) -> None:
    """Print a command's JSON result on one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """Print dimmed text to stderr, if it is a terminal."""
    if text and is_terminal(sys.stderr):
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        shown = printable(text)
        sys.stderr.write((shown if plain else f"\x1b[2m{shown}\x1b[0m") + end)
        sys.stderr.flush()


def warn(text: str) -> None:
    """Print a warning to stderr."""
    sys.stderr.write(f"warning: {printable(text)}\n")
    sys.stderr.flush()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> None:
    """Print a table, wrapped to the terminal width. Piped output is not wrapped.

    Args:
        heads: Column headings.
        rows: The cells of each row.
        optional: Headings of columns to omit if the terminal is too narrow, least useful first.
    """
    from rich.console import Console

    on_terminal = is_terminal(sys.stdout)
    shown = list(heads)
    table = _table(heads, rows, shown)
    unlimited = Console(width=10_000, highlight=False)
    console = Console(highlight=False) if on_terminal else unlimited
    for head in optional:
        if unlimited.measure(table).maximum > console.width:
            shown.remove(head)
            table = _table(heads, rows, shown)
    with console.capture() as capture:
        console.print(table)
    lines = (line.rstrip() for line in capture.get().splitlines())
    sys.stdout.write("\n".join(line for line in lines if line) + "\n")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    on_terminal = is_terminal(sys.stdout)
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    # Users copy names from the first column, so wrap it only if it exceeds half the terminal's width.
    longest = max((len(row[0]) for row in rows), default=0)
    first_folds = 2 * longest > shutil.get_terminal_size().columns
    columns = [column for column, head in enumerate(heads) if head in shown]
    for column in columns:
        folds = on_terminal and (column > 0 or first_folds)
        table.add_column(Text(heads[column]), overflow="fold", no_wrap=not folds)
    for row in rows:
        table.add_row(*(Text(line_of(row[column])) for column in columns))
    return table


class ProgressLine:
    """A progress callback that prints to stderr and forwards stop requests.

    On a terminal, updates one line in place and erases it at the end of the `with` block. Otherwise, prints
    one line per slow step.

    Args:
        stop: Stop requests to forward.
        in_pipe: Whether to print lines if stderr is not a terminal.
    """

    def __init__(self, stop: Stop, *, in_pipe: bool = True) -> None:
        self._stop, self._in_pipe = stop, in_pipe
        self._description = ""
        self._reported = False
        self._began: float | None = None
        self._since = self._shown = 0.0
        self._is_terminal = is_terminal(sys.stderr)

    def __call__(self, description: str, fraction: float) -> bool:
        """Show progress. Return False if a stop was requested, without showing anything."""
        if self._stop.requested:
            return False
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if description != self._description:
            self._description, self._since, self._reported = description, now, False
        if self._is_terminal:
            if now - self._began > _TERMINAL_DELAY_SECONDS and now - self._shown > 0.1:
                self._shown = now
                line = printable(f"{description}: {fraction:.0%}")[: shutil.get_terminal_size().columns - 1]
                sys.stderr.write(_CLEAR_LINE + line)
                sys.stderr.flush()
        elif self._in_pipe and now - self._since > _PIPE_DELAY_SECONDS and not self._reported:
            self._reported = True
            sys.stderr.write(f"{description}\n")
            sys.stderr.flush()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the progress line."""
        if self._is_terminal and self._shown:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
        self._began, self._shown = None, 0.0
