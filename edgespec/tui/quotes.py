"""Messages in triple quotes, which can span several lines."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["QUOTES", "ends_block", "unquoted"]

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


def unquoted(lines: Sequence[str]) -> str:
    """Return a message that `ends_block` has found complete, without its triple quotes."""
    return "\n".join(lines).rstrip()[len(QUOTES) : -len(QUOTES)]
