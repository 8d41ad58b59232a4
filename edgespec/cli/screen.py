"""What is written where: results on stdout, everything else on stderr, colour only on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from edgespec.cli.interrupt import Stop

__all__ = [
    "ProgressLine",
    "line_of",
    "note",
    "print_json",
    "print_table",
    "printable",
    "terminal_width",
    "write_text",
]

# Those that turn the direction of what follows would let one name be read as another.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_CLEAR_LINE = "\r\x1b[K"
_PATIENCE_SECONDS = 0.3
_PIPE_PATIENCE_SECONDS = 5.0


def is_terminal(stream: TextIO | None) -> bool:
    """True when a person reads or writes this stream."""
    return stream is not None and stream.isatty()


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; None in a pipe."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def printable(text: str) -> str:
    """Text without control characters: what a model or a file says must not steer the terminal."""
    return _CONTROLS.sub("", text)


def line_of(text: str) -> str:
    """A name or a message as one line, whatever is in it."""
    return printable(" ".join(text.splitlines()))


def write_text(text: str) -> None:
    """Write a reply to stdout at once: as it is into a pipe, without control characters on a terminal."""
    sys.stdout.write(printable(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def print_json(value: Mapping[str, object]) -> None:
    """Print the one JSON object of a command."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A dim line on stderr for the person at the terminal; nothing in a pipe."""
    if text and is_terminal(sys.stderr):
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        line = printable(text)
        sys.stderr.write(f"{line}\n" if plain else f"\x1b[2m{line}\x1b[0m\n")
        sys.stderr.flush()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns: fitted to a terminal, unwrapped in a pipe."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = is_terminal(sys.stdout)
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    # What comes first is what is typed: it stays in one piece where that leaves half of the line to the rest.
    longest = max((len(row[0]) for row in rows), default=0)
    first_folds = 2 * longest > shutil.get_terminal_size().columns
    for column, head in enumerate(heads):
        folds = on_terminal and (column > 0 or first_folds)
        table.add_column(Text(head), overflow="fold", no_wrap=not folds)
    for row in rows:
        # A name with line ends in it is one name.
        table.add_row(*(Text(line_of(cell)) for cell in row))
    console = Console(width=None if on_terminal else 10_000, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = (line.rstrip() for line in capture.get().splitlines())
    sys.stdout.write("\n".join(line for line in lines if line) + "\n")


class ProgressLine:
    """Says on stderr how far something long is, and passes a wish to stop on.

    On a terminal one line that changes and is wiped away; in a pipe one line for whatever takes long.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._what = ""
        self._said = False
        self._began: float | None = None
        self._since = self._shown = 0.0
        self._is_terminal = is_terminal(sys.stderr)

    def __call__(self, what: str, fraction: float) -> bool:
        """Progress as the API reports it; False once the person wants an end."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if what != self._what:
            self._what, self._since, self._said = what, now, False
        if self._is_terminal:
            if now - self._began > _PATIENCE_SECONDS and now - self._shown > 0.1:
                self._shown = now
                line = printable(f"{what}: {fraction:.0%}")[: shutil.get_terminal_size().columns - 1]
                sys.stderr.write(_CLEAR_LINE + line)
                sys.stderr.flush()
        elif now - self._since > _PIPE_PATIENCE_SECONDS and not self._said:
            self._said = True
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()
        return not self._stop.requested

    def clear(self) -> None:
        """Wipe the line away."""
        if self._is_terminal and self._shown:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
        self._began, self._shown = None, 0.0
