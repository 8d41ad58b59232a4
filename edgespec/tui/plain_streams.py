"""Input and output of the plain chat: lines from stdin, and replies in readable pieces."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from edgespec.system.stdio import decode_input
from edgespec.tui.controls import without_controls

__all__ = ["QUOTES", "InputLines", "ReplyPieces", "ends_block", "unquoted", "write"]

QUOTES = '"""'
"""Starts and ends a multi-line message."""

# Maximum time in seconds until the chat reacts to a signal while it waits for input.
_SIGNAL_SECONDS = 0.2
# Minimum number of characters to write at once. Screen readers pause between pieces, so short ones are hard
# to follow.
_PIECE_CHARACTERS = 60


class ReplyPieces:
    """Writes a reply to stdout as it grows, in whole lines or in long pieces that end at a space."""

    def __init__(self) -> None:
        self._text = ""
        self._last = "\n"

    def write(self, text: str) -> None:
        """Add text to the reply."""
        self._text += text
        end = self._text.rfind("\n") + 1
        if len(self._text) - end >= _PIECE_CHARACTERS:
            end = max(end, self._text.rfind(" ") + 1)
        self._flush(end)

    def end(self) -> None:
        """Write the rest of the text, and a line break unless the text ends with one."""
        self._flush(len(self._text))
        if self._last != "\n":
            write(sys.stdout, "\n")

    def _flush(self, end: int) -> None:
        if end:
            write(sys.stdout, self._text[:end])
            self._last, self._text = self._text[end - 1], self._text[end:]


def write(stream: TextIO, text: str) -> None:
    """Write text without control characters, and flush the stream."""
    stream.write(without_controls(text))
    stream.flush()


class InputLines:
    """Reads stdin line by line.

    Python runs a signal handler only after the current system call. A signal that arrives just before
    `sys.stdin.readline()` blocks would wait for the next line. So on POSIX, `read_line` waits in short steps.
    """

    def __init__(self) -> None:
        self._unread = b""
        self._number = 0

    def read_line(self) -> str:
        """Return the next line, or an empty string at the end of the input.

        Raises:
            OptionError: A line from a pipe or a file is not UTF-8.
        """
        if sys.stdin.isatty() and sys.platform == "win32":
            return sys.stdin.readline()
        line = self._read_bytes()
        if sys.stdin.isatty():
            return line.decode(sys.stdin.encoding, "replace")
        self._number += 1
        return decode_input(line, self._number)

    def _read_bytes(self) -> bytes:
        if sys.platform == "win32":
            return sys.stdin.buffer.readline()
        number = sys.stdin.fileno()
        while b"\n" not in self._unread:
            if not select.select([number], [], [], _SIGNAL_SECONDS)[0]:
                continue
            new = os.read(number, 1 << 16)
            self._unread += new
            if not new:
                break
        line, newline, self._unread = self._unread.partition(b"\n")
        return line + newline


def ends_block(lines: Sequence[str]) -> bool:
    """Return whether the last line ends a message that starts with triple quotes.

    A line containing only three quotes always ends it. If text follows the opening quotes, three quotes at
    the end of a line also end it, unless they close a nested string, such as a docstring in pasted Python.
    """
    first, last = lines[0].rstrip(), lines[-1].rstrip()
    if len(lines) > 1 and last == QUOTES:
        return True
    inner = "\n".join(lines).rstrip().removeprefix(QUOTES)
    return first != QUOTES and inner.endswith(QUOTES) and inner.count(QUOTES) % 2 == 1


def unquoted(lines: Sequence[str]) -> str:
    """Return a message that `ends_block` has found complete, without its triple quotes."""
    return "\n".join(lines).rstrip()[len(QUOTES) : -len(QUOTES)]
