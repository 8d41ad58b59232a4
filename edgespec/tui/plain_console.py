"""Input and output of the plain chat: lines from stdin, notes, and replies in readable pieces."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType
from typing import TextIO

from edgespec.system.stdio import decode_input
from edgespec.system.waiting import SignalEvent
from edgespec.tui.input_syntax import QUOTES, block_text, ends_block

# Matches control characters, and characters that change the text direction and can disguise a name.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# Pressing Ctrl-C twice within this many seconds quits the chat.
_TWICE_SECONDS = 2.0
# Maximum delay in seconds before the chat reacts to a signal while waiting for input.
_SIGNAL_SECONDS = 0.2
# Minimum number of characters to write at once. Screen readers pause between pieces, so short pieces are hard
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
    """Write text without control characters other than line breaks and tabs, and flush the stream."""
    stream.write(CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else "", text))
    stream.flush()


class _InputLines:
    """Reads stdin line by line.

    Python runs a signal handler only after the current system call. If a signal arrived just before
    `sys.stdin.readline()` blocked, its handler would not run until the next line. To avoid this, `read_line`
    polls stdin on POSIX.
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


class PlainConsole:
    """Prompts the user of the plain chat for messages and answers, and prints notes.

    Runs in the main thread, which Ctrl-C interrupts. Results go to stdout, everything else to stderr.

    Args:
        stop_reply: Called when the user presses Ctrl-C.

    Attributes:
        is_interactive: Whether stdin is a terminal, as opposed to a pipe or a file.
        interrupted: Set when the user presses Ctrl-C. Callers clear it before they start long work.
        leaving: True once the chat is about to end.
    """

    def __init__(self, stop_reply: Callable[[], None]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self.interrupted = SignalEvent()
        self.leaving = False
        self._stop_reply = stop_reply
        self._input = _InputLines()
        self._interrupted_at = -_TWICE_SECONDS
        self._is_reading = False

    def on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C: stop the reply, or quit if Ctrl-C was pressed twice.

        Raises an exception only while the chat waits for input, so that no other work is left half done.
        """
        now = monotonic()
        self.leaving = self.leaving or now - self._interrupted_at < _TWICE_SECONDS
        self._interrupted_at = now
        self.interrupted.set()
        self._stop_reply()
        if self._is_reading:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        """Print a message from edgespec, as opposed to the model, to stderr."""
        write(sys.stderr, f"{text}\n")

    def answer(self, text: str) -> None:
        """Print the result of a command to stdout."""
        write(sys.stdout, f"{text}\n")

    def ask(self, question: str, answers: Sequence[str]) -> str:
        """Repeat a question until the user types one of the answers.

        Returns:
            The answer, or an empty string if the user pressed Ctrl-C or the input ended.
        """
        self.note(question)
        while True:
            line = self._read_line("? ")
            if not line:
                return ""
            if (answer := line.strip().lower()) in answers:
                return answer
            self.note(f"Type {', '.join(answers[:-1])} or {answers[-1]}.")

    def read_message(self) -> str | None:
        """Return the next message, or None at the end of the input.

        A message in triple quotes can span several lines. See `ends_block`.
        """
        lines: list[str] = []
        while True:
            line = self._read_line("... " if lines else "> ")
            if line is None:
                lines.clear()
                if self.leaving:
                    return None
                self.note("\nPress Ctrl-C again to quit. The chat is saved.")
                continue
            if not line:
                if lines:
                    self.note(f"The message that starts with {QUOTES} is sent without closing quotes.")
                return "\n".join(lines).removeprefix(QUOTES) or None
            lines.append(line.rstrip("\r\n"))
            if not lines[0].startswith(QUOTES):
                return lines[0]
            if ends_block(lines):
                return block_text(lines)

    def _read_line(self, prompt: str) -> str | None:
        """Return the next line of the input, an empty string at its end, or None after Ctrl-C."""
        if self.is_interactive:
            write(sys.stderr, prompt)
        try:
            self._is_reading = True
            return self._input.read_line()
        except KeyboardInterrupt:
            return None
        finally:
            self._is_reading = False
