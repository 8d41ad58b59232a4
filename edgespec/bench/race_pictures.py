"""Lay out a race on a grid of character cells, which can be shown in a terminal or saved as an SVG image."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size

from edgespec.bench.race import Lane, Race
from edgespec.errors import OptionError
from edgespec.system.files import error_reason, format_rate
from edgespec.system.spelling import REMOVED_NAMES

__all__ = ["Picture", "RaceEvent", "check_picture_path", "save_picture"]

_GAP_CELLS = 3
_PICTURE_COLUMNS = 100
# Seconds between updates of the displayed speeds.
_SPEED_SECONDS = 0.25
_ACCEPTED, _OWN, _FAINT, _BOLD = "32", "33", "2", "1"
_LEGEND = ((_ACCEPTED, "accepted guesses"), (_OWN, "written by the model itself"))
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# Character width, line height and margin of the SVG image, in pixels.
_CELL_WIDTH, _LINE_HEIGHT, _MARGIN = 8.4, 19, 20


class RaceEvent(NamedTuple):
    """Text that appears at one position on the screen.

    Attributes:
        seconds: Time at which the text appears, in seconds since the start.
        row: Row, counted from 0.
        column: Column, counted from 0.
        style: Parameter of the ANSI escape sequence for the colour or style, or an empty string.
    """

    seconds: float
    row: int
    column: int
    text: str
    style: str


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    end: int


class Picture:
    """A race on a grid of character cells: the prompt, two columns of text, and the result.

    Lines are wrapped as in the finished text, so that words do not move while the text appears.

    Args:
        race: The race to draw.
        prompt: The prompt, shown above the replies.
        columns: Width in cells.
        max_rows: Maximum number of rows for the replies. Further rows are not shown.

    Attributes:
        rows: Number of rows.
        columns: Width in cells.
        seconds: Duration of the slower reply.
        events: All events in chronological order. Each overwrites earlier text at its position.
    """

    def __init__(self, race: Race, prompt: str, columns: int, max_rows: int | None = None) -> None:
        self.columns = columns
        self._race = race
        self._width = max(8, (columns - _GAP_CELLS) // 2)
        self.seconds = max(race.plain.seconds, race.other.seconds)
        lanes = ((race.plain, "plain decoding", 0), (race.other, race.other.method, self._width + _GAP_CELLS))
        heading = _wrapped(f"> {_cleaned(prompt)}", columns)[:3]
        self._top = len(heading) + 1
        events = [RaceEvent(0.0, row, 0, text, _BOLD) for row, text in enumerate(heading)]
        height = 0
        for lane, name, left in lanes:
            title = f"{name[: self._width]}"
            events.append(RaceEvent(0.0, self._top, left, title, _BOLD))
            pieces = [each for each in self._pieces(lane, left) if max_rows is None or each.row < max_rows]
            height = max([height, *(each.row + 1 for each in pieces)])
            events += [each._replace(row=each.row + self._top + 2) for each in pieces]
            events += self._speeds(lane, left)
        end = self._top + 2 + height + 1
        result = [line for text in (race.headline(), *race.remarks()) for line in _wrapped(text, columns)]
        events += [RaceEvent(self.seconds, end + row, 0, text, "") for row, text in enumerate(result)]
        self.rows = end + len(result) + 1 + len(_LEGEND)
        for row, (style, meaning) in enumerate(_LEGEND, self.rows - len(_LEGEND)):
            events += [
                RaceEvent(0.0, row, 0, "■", style),
                RaceEvent(0.0, row, 2, meaning[: columns - 2], _FAINT),
            ]
        self.events = sorted(events, key=lambda event: event.seconds)

    def _pieces(self, lane: Lane, left: int) -> Iterator[RaceEvent]:
        """Yield the events that show a reply's text, with rows counted from its first line."""
        text = _cleaned(lane.text)
        lines = list(_broken(text, self._width))
        place = number = 0
        for chunk in lane.chunks:
            style = _ACCEPTED if chunk.accepted else _OWN
            end = place + len(_cleaned(chunk.text))
            while place < end:
                while number + 1 < len(lines) and place >= lines[number + 1].start:
                    number += 1
                line = lines[number]
                until = min(end, lines[number + 1].start if number + 1 < len(lines) else end)
                if shown := text[place : min(until, line.end)]:
                    column = left + cell_len(text[line.start : place])
                    yield RaceEvent(chunk.seconds, number, column, shown, style)
                place = until

    def _speeds(self, lane: Lane, left: int) -> Iterator[RaceEvent]:
        """Yield updates to the line below the heading, which shows the token count and the speed so far."""
        seconds = 0.0
        while True:
            seconds = min(seconds + _SPEED_SECONDS, lane.seconds)
            tokens = lane.tokens_at(seconds)
            speed = tokens / seconds if seconds else 0.0
            done = " ✓" if seconds >= lane.seconds else ""
            text = f"{format_rate(speed, 1):>5} tok/s · {tokens} tokens in {seconds:.1f} s{done}"
            yield RaceEvent(seconds, self._top + 1, left, text[: self._width].ljust(self._width), _FAINT)
            if seconds >= lane.seconds:
                return

    def svg(self) -> str:
        """Return the finished race as an SVG picture."""
        width = self.columns * _CELL_WIDTH + 2 * _MARGIN
        height = self.rows * _LINE_HEIGHT + 2 * _MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{escape(f'edgespec race: {self._race.headline()}')}</title>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#15171c"/>',
            '<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14" xml:space="preserve">',
        ]
        # Keep only the last event at each position.
        for event in {(each.row, each.column): each for each in self.events}.values():
            x = _MARGIN + event.column * _CELL_WIDTH
            y = _MARGIN + (event.row + 0.8) * _LINE_HEIGHT
            length = cell_len(event.text.rstrip()) * _CELL_WIDTH
            if not length:
                continue
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
                f"{_SVG_STYLES[event.style]}>{escape(event.text.rstrip())}</text>"
            )
        return "\n".join([*parts, "</g>", "</svg>", ""])


_SVG_STYLES = {
    "": ' fill="#d5d8de"',
    _ACCEPTED: ' fill="#8ec07c"',
    _OWN: ' fill="#e5b567"',
    _FAINT: ' fill="#868d9a"',
    _BOLD: ' fill="#d5d8de" font-weight="bold"',
}


def styled(event: RaceEvent) -> str:
    """Return the text of an event, wrapped in the terminal escape codes for its style."""
    return f"\x1b[{event.style}m{event.text}\x1b[0m" if event.style else event.text


def check_picture_path(path: Path) -> None:
    """Raise OptionError if a picture of a race cannot be saved to this path."""
    suffix = path.suffix.lower()
    if suffix in REMOVED_NAMES:
        raise OptionError(
            f"cannot save {str(path)!r}: recordings of races were removed",
            REMOVED_NAMES[suffix],
            code="option_removed",
        )
    if suffix != ".svg":
        raise OptionError(
            f"{str(path)!r} is not a valid file name for a picture of a race", "use a name that ends in .svg"
        )
    if not path.absolute().parent.is_dir():
        raise OptionError(
            f"the folder for {str(path)!r} does not exist", "create it, or choose an existing folder"
        )


def save_picture(race: Race, prompt: str, path: Path) -> None:
    """Save the finished race as an SVG picture.

    Raises:
        OptionError: The name does not end in `.svg`, or the file cannot be written.
    """
    check_picture_path(path)
    try:
        path.write_text(Picture(race, prompt, _PICTURE_COLUMNS).svg(), "utf-8")
    except OSError as error:
        raise OptionError(
            f"cannot write {str(path)!r}: {error_reason(error)}",
            "use a writable path",
            code="file_not_written",
        ) from error


def _cleaned(text: str) -> str:
    """Replace tabs with spaces, and remove control characters, which could alter the terminal's state."""
    return _CONTROLS.sub("", text.replace("\t", "    "))


def _wrapped(text: str, width: int) -> list[str]:
    return [text[line.start : line.end] for line in _broken(text, width)]


def _broken(text: str, width: int) -> Iterator[_Line]:
    """Wrap text into lines of at most `width` cells, between words if possible.

    The spaces and line breaks at which the text is split are dropped.
    """
    start = cells = 0
    space = -1
    place = 0
    while place < len(text):
        character = text[place]
        if character == "\n":
            yield _Line(start, place)
            start, cells, space = place + 1, 0, -1
            place += 1
            continue
        cells += get_character_cell_size(character)
        if cells > width and place > start:
            if character == " ":
                space = place
            end = space if space > start else place
            yield _Line(start, end)
            start = end + 1 if text[end] == " " else end
            cells, space, place = 0, -1, start
            continue
        if character == " ":
            space = place
        place += 1
    yield _Line(start, len(text))
