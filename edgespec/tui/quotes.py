"""Quotes in what the user types: messages in triple quotes, and quoted arguments of commands."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["QUOTES", "block_text", "ends_block", "unquoted"]

QUOTES = '"""'
"""Starts and ends a multi-line message."""


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


def block_text(lines: Sequence[str]) -> str:
    """Return a message that `ends_block` has found complete, without its triple quotes."""
    return "\n".join(lines).rstrip()[len(QUOTES) : -len(QUOTES)]


def unquoted(text: str) -> str:
    """Return the text without surrounding quotes, which some users write around values."""
    for quotes in (QUOTES, '"', "'"):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)].strip()
    return text
