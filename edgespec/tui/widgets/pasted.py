"""Long pasted texts, which the input shows as one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgespec.tui.numbers import count

__all__ = ["PastedTexts"]

# A pasted text with more lines or characters than this is folded. The input shows eight lines.
_MAX_LINES, _MAX_CHARACTERS = 8, 1000
_LINE_BREAK = re.compile(r"\r\n?")


class PastedTexts:
    """The long texts that were pasted into the input, by the label that stands for each of them.

    They are kept until the chat ends, because undo can bring back a label.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    @staticmethod
    def is_long(text: str) -> bool:
        """Return whether a pasted text is folded."""
        return len(text) > _MAX_CHARACTERS or len(text.splitlines()) > _MAX_LINES

    def fold(self, text: str, token_count: int | None) -> str:
        """Keep a text, and return the label that stands for it in the input.

        Args:
            text: The text.
            token_count: Its number of tokens, or None if it is unknown.
        """
        text = _LINE_BREAK.sub("\n", text)
        size = f"{count(len(text), 'character')}" if token_count is None else count(token_count, "token")
        lines = count(len(text.splitlines()), "line")
        label = f"[Pasted text {len(self._texts) + 1}: {lines}, {size}]"
        self._texts[label] = text
        return label

    def whole(self, text: str) -> str:
        """Return the text of the input with the pasted texts in place of their labels."""
        if not self._texts:
            return text
        labels = re.compile("|".join(map(re.escape, self._texts)))
        return labels.sub(lambda match: self._texts[match[0]], text)

    def folded(self, text: str) -> str:
        """Return a text with labels in place of the pasted texts that it contains."""
        for label, pasted in self._texts.items():
            text = text.replace(pasted, label)
        return text

    def label_at(self, line: str, column: int) -> tuple[int, int] | None:
        """Return the first column of the label around a column of a line, and the column after the label.

        Return None if there is no label, or the column is at its start or end.
        """
        return next(((first, end) for first, end in self._labels(line) if first < column < end), None)

    def _labels(self, line: str) -> Iterator[tuple[int, int]]:
        for label in self._texts:
            first = line.find(label)
            while first >= 0:
                yield first, first + len(label)
                first = line.find(label, first + 1)
