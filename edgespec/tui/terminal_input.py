"""Harden terminal input: invalid bytes never end the chat, and pasted text never acts as key presses.

Textual decodes the terminal's bytes strictly, so a single byte in another encoding, such as a pasted Latin-1
character, ends the app. It also treats control characters in pasted text as keys.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser

if TYPE_CHECKING:
    from textual.driver import Driver
    from textual.message import Message

__all__ = ["InputParser", "guard_input", "pasted_text"]

# Matches escape sequences, such as those for colours and titles, and all control characters except tabs and
# line breaks.
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_LINE_BREAK = re.compile(r"\r\n?")


def guard_input(driver: type[Driver]) -> None:
    """Make a driver decode invalid bytes as U+FFFD, and parse its input with `InputParser`.

    Textual has no option for either, so this replaces two names in the driver's module.
    """
    module = sys.modules[driver.__module__]
    for name, guarded in (("XTermParser", InputParser), ("getincrementaldecoder", _lenient_decoder)):
        if hasattr(module, name):
            setattr(module, name, guarded)


def _lenient_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    """Return a decoder factory that replaces invalid bytes. Stands in for `codecs.getincrementaldecoder`."""
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")


def pasted_text(text: str) -> str:
    """Return pasted text with `\\n` as line break, and without escape sequences or control characters."""
    return _SEQUENCES.sub("", _LINE_BREAK.sub("\n", text))


class InputParser(XTermParser):
    """Passes pasted text to Textual's parser only once it is complete, and without control characters.

    Otherwise, an escape character within the text would end the paste, and the rest would be treated as key
    presses. A line break, for example, would send the message.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: list[str] | None = None
        # The last characters received, kept because a marker can be split across two reads.
        self._tail = ""
        self._found = False
        self._is_first = True

    def feed(self, data: str) -> Iterable[Message]:
        """Parse data from the terminal. An empty string ends the input."""
        if not data:
            yield from super().feed(data)
            return
        if self._is_first:
            # Until Textual takes over, the terminal itself turns Enter into a line feed.
            self._is_first = False
            keys, start, pasted = data.partition(BRACKETED_PASTE_START)
            data = keys.replace("\n", "\r") + start + pasted
        while data:
            if self._pasted is None:
                passed, data = self._split(data, BRACKETED_PASTE_START)
                if passed:
                    yield from super().feed(passed)
                if self._found:
                    self._pasted = []
            else:
                text, data = self._split(data, BRACKETED_PASTE_END)
                self._pasted.append(text)
                if self._found:
                    whole, self._pasted = "".join(self._pasted), None
                    text = pasted_text(whole.removesuffix(BRACKETED_PASTE_END))
                    yield from super().feed(text + BRACKETED_PASTE_END)

    def _split(self, data: str, marker: str) -> tuple[str, str]:
        """Split data after a marker, whose beginning may have arrived in earlier data.

        Sets `_found` to whether the whole marker was found.
        """
        before = len(self._tail)
        end = (self._tail + data).find(marker)
        self._found = end >= 0
        if not self._found:
            self._tail = (self._tail + data)[1 - len(marker) :]
            return data, ""
        self._tail = ""
        position = end + len(marker) - before
        return data[:position], data[position:]
