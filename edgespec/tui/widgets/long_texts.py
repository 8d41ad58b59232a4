"""Limit how much of a very long text the chat shows, because drawing all of it would freeze the chat.

Long text pasted into the input is folded into a one-line label.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec import TextChunk

# Maximum number of characters that can be pasted into the input. Wrapping longer text would block the UI for
# seconds.
MAX_INPUT_CHARACTERS = 500_000
# Maximum number of characters of plain text to show. Textual wraps about 200,000 characters per second.
_MAX_CHARACTERS = 100_000
# Pasted text with more lines or characters than this is folded. The input shows eight lines.
_MAX_PASTED_LINES, _MAX_PASTED_CHARACTERS = 8, 1000
# Seconds for parsing and wrapping one character of Markdown, and additional seconds for each non-blank line
# and each table cell. Both were measured with short list items and bold words.
_CHARACTER_SECONDS, _ITEM_SECONDS = 3e-6, 6e-5
# Maximum estimated time in seconds for showing a reply. The rest of a longer reply is hidden.
_MAX_SECONDS = 1.0
_LINE_BREAK = re.compile(r"\r\n?")


def too_long_text(characters: int) -> str:
    """Return a note that pasted text is too long for the input, and how to send it anyway."""
    return (
        f"The pasted text has {count(characters)} characters, but the input takes at most"
        f" {count(MAX_INPUT_CHARACTERS)}. Save it to a file, and attach that with @ and its path."
    )


def limited_text(text: str, advice: str = "") -> str:
    """Return the start of plain text. If the rest is cut off, append a note with advice on reading it."""
    if (hidden := len(text) - _MAX_CHARACTERS) <= 0:
        return text
    return f"{text[:_MAX_CHARACTERS]}…\n{hidden_note(hidden, advice)}"


def limited_chunks(chunks: Sequence[TextChunk]) -> Sequence[TextChunk]:
    """Return the first chunks, with at most 100,000 characters in total."""
    characters = 0
    for number, chunk in enumerate(chunks):
        characters += len(chunk.text)
        if characters > _MAX_CHARACTERS:
            return chunks[:number]
    return chunks


def limited_markdown(markdown: str) -> str:
    """Return as much of the start of `markdown` as can be drawn in about a second."""
    end, left_seconds = 0, _MAX_SECONDS
    for line, seconds in _line_costs(markdown):
        if seconds > left_seconds:
            return markdown[: end + int(len(line) * left_seconds / seconds)]
        end += len(line)
        left_seconds -= seconds
    return markdown[:end]


def drawing_seconds(markdown: str) -> float:
    """Estimate how many seconds it takes to draw the Markdown that `limited_markdown` returns."""
    return min(_MAX_SECONDS, sum(seconds for _, seconds in _line_costs(markdown)))


def hidden_note(characters: int, advice: str = "") -> str:
    """Return a note on how many characters are hidden, with advice on how to read them."""
    number = "1 more character is" if characters == 1 else f"{count(characters)} more characters are"
    return f"({number} not shown; {advice})" if advice else f"({number} not shown)"


def _line_costs(markdown: str) -> Iterator[tuple[str, float]]:
    """Yield each line with its estimated drawing time in seconds. Omits the end of very long text."""
    for line in markdown[: int(_MAX_SECONDS / _CHARACTER_SECONDS)].splitlines(keepends=True):
        items = line.count("|") + bool(line.strip())
        yield line, len(line) * _CHARACTER_SECONDS + items * _ITEM_SECONDS


class PastedTexts:
    """Long pasted texts, keyed by the labels that represent them in the input.

    They are kept until the chat ends, because undo can bring back a label.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    @staticmethod
    def is_long(text: str) -> bool:
        """Return whether pasted text is long enough to be folded."""
        return len(text) > _MAX_PASTED_CHARACTERS or len(text.splitlines()) > _MAX_PASTED_LINES

    def fold(self, text: str, token_count: int | None) -> str:
        """Store pasted text, and return the label that represents it in the input.

        Args:
            text: The pasted text.
            token_count: Its number of tokens, or None if it is unknown.
        """
        text = _LINE_BREAK.sub("\n", text)
        size = f"{count(len(text), 'character')}" if token_count is None else count(token_count, "token")
        lines = count(len(text.splitlines()), "line")
        label = f"[Pasted text {len(self._texts) + 1}: {lines}, {size}]"
        self._texts[label] = text
        return label

    def whole(self, text: str) -> str:
        """Replace the labels in `text` with the pasted texts that they represent."""
        if not self._texts:
            return text
        labels = re.compile("|".join(map(re.escape, self._texts)))
        return labels.sub(lambda match: self._texts[match[0]], text)

    def folded(self, text: str) -> str:
        """Replace the pasted texts in `text` with their labels."""
        for label, pasted in self._texts.items():
            text = text.replace(pasted, label)
        return text

    def without_last(self, text: str) -> str:
        """Return the text without its last character, or without the label at its end."""
        label = next((each for each in self._texts if text.endswith(each)), text[-1:])
        return text.removesuffix(label)

    def label_at(self, line: str, column: int) -> tuple[int, int] | None:
        """Return the first column of the label that encloses `column`, and the column after the label.

        Returns None if there is no label, or if `column` is at its start or end.
        """
        return next(((first, end) for first, end in self._labels(line) if first < column < end), None)

    def _labels(self, line: str) -> Iterator[tuple[int, int]]:
        for label in self._texts:
            first = line.find(label)
            while first >= 0:
                yield first, first + len(label)
                first = line.find(label, first + 1)
