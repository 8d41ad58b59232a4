"""Limit how much of a very long text the chat shows, because drawing all of it would freeze the chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec import TextChunk

__all__ = [
    "MAX_INPUT_CHARACTERS",
    "drawing_seconds",
    "hidden_note",
    "limited_chunks",
    "limited_markdown",
    "limited_text",
]

# Maximum number of characters in text that is pasted into the input. Wrapping longer text would block the
# screen for seconds.
MAX_INPUT_CHARACTERS = 500_000
# Maximum number of characters of plain text to show. Textual wraps about 200,000 characters per second.
_MAX_CHARACTERS = 100_000
# Seconds for reading and wrapping one character of Markdown, and additional seconds for each non-blank line
# and each table cell. Measured with short list items and bold words.
_CHARACTER_SECONDS, _ITEM_SECONDS = 3e-6, 6e-5
# Maximum estimated time in seconds for showing a reply. The rest of a longer reply is hidden.
_MAX_SECONDS = 1.0


def limited_text(text: str, advice: str = "") -> str:
    """Return the start of plain text. If the rest is cut, append a note with advice on how to read it."""
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
    """Return a note that says how many characters are not shown, with advice on how to read them."""
    number = "1 more character is" if characters == 1 else f"{count(characters)} more characters are"
    return f"({number} not shown; {advice})" if advice else f"({number} not shown)"


def _line_costs(markdown: str) -> Iterator[tuple[str, float]]:
    """Yield each line with the estimated seconds that it takes to draw. Omit the end of a very long text."""
    for line in markdown[: int(_MAX_SECONDS / _CHARACTER_SECONDS)].splitlines(keepends=True):
        items = line.count("|") + bool(line.strip())
        yield line, len(line) * _CHARACTER_SECONDS + items * _ITEM_SECONDS
