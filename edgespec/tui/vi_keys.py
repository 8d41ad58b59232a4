"""vi keys for the text input: insert mode, and normal mode with a small set of commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from textual.widgets import TextArea

__all__ = ["ViKeys"]

Mode = Literal["insert", "normal"]
_Place = tuple[int, int]
# Matches what vi considers a word: a run of letters, digits and underscores, or a run of punctuation.
_WORD = re.compile(r"\w+|[^\w\s]+")
_MOTION = r"[hjklwbe0^$G]|gg"
_COUNT = r"[1-9]\d{0,3}"
_COMMAND = re.compile(
    rf"(?P<count>{_COUNT})?"
    rf"(?:(?P<operator>[dcy])(?P<inner>{_COUNT})?(?P<motion>{_MOTION}|(?P=operator))"
    rf"|(?P<alone>{_MOTION})|(?P<action>[xDCpPuiaIAoO]))"
)
# Matches the start of a command.
_PREFIX = re.compile(rf"(?:{_COUNT})?(?:[dcy](?:{_COUNT})?)?g?")
# Maximum count before a command, such as 10 in `10x`. Limits how long a command takes.
_MAX_COUNT = 1_000


class ViKeys:
    """Interprets keys as vi does, and edits a `TextArea`.

    Normal mode supports the motions `h j k l w b e 0 ^ $ gg G`; the operators `d c y`, followed by a motion
    or doubled; the commands `x D C p P u i a I A o O`; and counts.

    Attributes:
        mode: `insert` or `normal`.
    """

    def __init__(self, area: TextArea) -> None:
        self.mode: Mode = "insert"
        self._area = area
        self._typed = ""
        self._register = ""

    def key(self, key: str, character: str | None) -> bool:
        """Handle a key. Return False to let the text area handle it as usual."""
        if key == "escape":
            return self._escape()
        if self.mode == "insert" or character is None or not character.isprintable():
            return False
        self._typed += character
        # Check for a longer command first: the `0` in `10l` is a digit, not the motion to the line's start.
        if not _PREFIX.fullmatch(self._typed):
            match, self._typed = _COMMAND.fullmatch(self._typed), ""
            if match is not None:
                self._run(match)
        return True

    def _escape(self) -> bool:
        """Switch to normal mode. Return False if already in normal mode, where Esc has its usual meaning."""
        if self.mode == "normal":
            pending, self._typed = self._typed, ""
            return bool(pending)
        self.mode = "normal"
        self._move((self._row, max(0, self._column - 1)))
        return True

    @property
    def _row(self) -> int:
        return self._area.cursor_location[0]

    @property
    def _column(self) -> int:
        return self._area.cursor_location[1]

    def _line(self, row: int) -> str:
        return self._area.document.get_line(row)

    def _move(self, place: _Place) -> None:
        self._area.move_cursor(place)

    def _run(self, match: re.Match[str]) -> None:
        count = min(int(match["count"] or 1) * int(match["inner"] or 1), _MAX_COUNT)
        operator, motion, action = match["operator"], match["motion"] or match["alone"], match["action"]
        if operator and (motion == operator):
            self._change_lines(operator, count)
        elif operator:
            self._change_to(operator, motion, count)
        elif motion:
            numbered = bool(match["count"])
            self._move(self._target(motion, count, numbered))
        else:
            self._act(action, count)
        if self.mode == "normal":
            # In normal mode, the cursor is on a character, not after the last one.
            row, column = self._area.cursor_location
            self._move((row, min(column, max(0, len(self._line(row)) - 1))))

    def _target(self, motion: str, count: int, numbered: bool = False) -> _Place:
        """Return the cursor position after a motion."""
        row, column = self._row, self._column
        last_row = self._area.document.line_count - 1
        match motion:
            case "h":
                return row, max(0, column - count)
            case "l":
                return row, min(len(self._line(row)), column + count)
            case "j" | "k":
                row = min(max(0, row + (count if motion == "j" else -count)), last_row)
                return row, min(column, len(self._line(row)))
            case "0":
                return row, 0
            case "^":
                return row, len(self._line(row)) - len(self._line(row).lstrip())
            case "$":
                return row, len(self._line(row))
            case "gg" | "G":
                row = count - 1 if numbered else (0 if motion == "gg" else last_row)
                return min(row, last_row), 0
        place = (row, column)
        for _ in range(count):
            place = self._word(motion, place)
        return place

    def _word(self, motion: str, place: _Place) -> _Place:
        """Return the position that the motion `w`, `b` or `e` reaches from `place`."""
        row = place[0]
        step = -1 if motion == "b" else 1
        while 0 <= row < self._area.document.line_count:
            words = [*_WORD.finditer(self._line(row))]
            if motion == "b":
                found = [word.start() for word in words if (row, word.start()) < place]
            elif motion == "w":
                found = [word.start() for word in words if (row, word.start()) > place][:1]
            else:
                found = [word.end() - 1 for word in words if (row, word.end() - 1) > place][:1]
            if found:
                return row, found[-1]
            row += step
        return (0, 0) if step < 0 else self._area.document.end

    def _change_to(self, operator: str, motion: str, count: int) -> None:
        """Delete, change or copy the text between the cursor and the target of a motion."""
        if motion in ("j", "k", "G", "gg"):
            rows = sorted((self._row, self._target(motion, count)[0]))
            self._move((rows[0], self._column))
            self._change_lines(operator, rows[1] - rows[0] + 1)
            return
        here = self._area.cursor_location
        # As in vi, `cw` on a word does not change the space after the word.
        if (operator, motion) == ("c", "w") and self._line(self._row)[self._column :][:1].strip():
            motion = "e"
        there = self._target(motion, count)
        if motion == "w" and there[0] > here[0]:
            there = (here[0], len(self._line(here[0])))
        start, end = sorted((here, there))
        if motion == "e":
            end = (end[0], min(end[1] + 1, len(self._line(end[0]))))
        self._register = self._area.get_text_range(start, end)
        if operator != "y":
            self._area.delete(start, end)
        self._move(start)
        if operator == "c":
            self.mode = "insert"

    def _change_lines(self, operator: str, count: int) -> None:
        """Delete, change or copy whole lines."""
        document, row = self._area.document, self._row
        last = min(row + count, document.line_count) - 1
        end = (last, len(self._line(last)))
        self._register = self._area.get_text_range((row, 0), end) + "\n"
        if operator == "c":
            self._area.delete((row, 0), end)
            self.mode = "insert"
        elif operator == "d":
            if last + 1 < document.line_count:
                self._area.delete((row, 0), (last + 1, 0))
            else:
                self._area.delete((row - 1, len(self._line(row - 1))) if row else (0, 0), end)
            self._move((min(row, document.line_count - 1), 0))

    def _act(self, action: str, count: int) -> None:
        row, column = self._area.cursor_location
        line = self._line(row)
        match action:
            case "x":
                self._change_to("d", "l", count)
            case "D" | "C":
                self._change_to(action.lower(), "$", 1)
            case "p" | "P":
                self._paste(self._register * count, before=action == "P")
            case "u":
                for _ in range(count):
                    self._area.undo()
            case "o":
                self._area.insert("\n", (row, len(line)))
                self._move((row + 1, 0))
            case "O":
                self._area.insert("\n", (row, 0))
                self._move((row, 0))
            case "a":
                self._move((row, min(column + 1, len(line))))
            case "A":
                self._move((row, len(line)))
            case "I":
                self._move(self._target("^", 1))
        if action in "iaIAoO":
            self.mode = "insert"

    def _paste(self, text: str, *, before: bool) -> None:
        row, column = self._area.cursor_location
        line = self._line(row)
        if not text.endswith("\n"):
            place = (row, column if before else min(column + 1, len(line)))
            self._area.insert(text, place)
        elif before:
            self._area.insert(text, (row, 0))
            self._move((row, 0))
        else:
            self._area.insert("\n" + text[:-1], (row, len(line)))
            self._move((row + 1, 0))
