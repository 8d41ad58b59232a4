"""Read the items of a large JSON list one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["ItemTooLargeError", "json_items"]

# Number of characters to read first. Each further read for the same item doubles the number, so that the time
# for an item grows only linearly with its length.
_PART_CHARACTERS = 1 << 20


class ItemTooLargeError(Exception):
    """Raised when an item of the list is longer than allowed."""


def json_items(stream: TextIO, max_characters: int) -> Iterator[Any]:
    """Yield the items of a JSON list, or the value itself if it is not a list.

    Memory use depends on the largest item, not on the length of the list.

    Args:
        stream: The JSON text.
        max_characters: Maximum length of an item.

    Raises:
        ItemTooLargeError: An item is too long.
        RecursionError: An item is nested too deeply.
        ValueError: The text is not valid JSON.
    """
    reader = _Reader(stream, max_characters)
    if not reader.skip("["):
        yield reader.value()
    elif not reader.skip("]"):
        yield reader.value()
        while reader.skip(","):
            yield reader.value()
        if not reader.skip("]"):
            raise ValueError("the list is not complete")
    if not reader.is_at_end():
        raise ValueError("there is more text after the JSON value")


class _Reader:
    def __init__(self, stream: TextIO, max_characters: int) -> None:
        self._stream, self._max_characters = stream, max_characters
        self._decode = json.JSONDecoder().raw_decode
        # The text that has been read but not yet parsed starts at `_at`.
        self._text, self._at = "", 0

    def skip(self, mark: str) -> bool:
        """Skip the character `mark` if it comes next. Return whether it did."""
        if self.is_at_end() or self._text[self._at] != mark:
            return False
        self._at += 1
        return True

    def is_at_end(self) -> bool:
        """Skip whitespace, and return whether the text ends after it."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return False
            if not self._read(_PART_CHARACTERS):
                return True

    def value(self) -> Any:
        """Return the next value."""
        if self.is_at_end():
            raise ValueError("a value is missing")
        size = _PART_CHARACTERS
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                # A number at the end of the text read so far may be incomplete.
                if end < len(self._text) or not self._read(size):
                    self._at = end
                    return value
            except ValueError:
                # The value may just be incomplete, so read more of it.
                if len(self._text) - self._at > self._max_characters:
                    raise ItemTooLargeError from None
                if not self._read(size):
                    raise
            size *= 2

    def _read(self, characters: int) -> bool:
        """Read more text, and discard the text before `_at`. Return False at the end of the text."""
        more = self._stream.read(characters)
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)
