"""Colour the Markdown of a reply by the origin of its words: accepted guesses, or the model itself."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

from textual.content import Span

from edgespec.tui.widgets.markdown_blocks import Block

__all__ = ["GUESSED_STYLE", "OWN_STYLE", "OriginColours"]

GUESSED_STYLE, OWN_STYLE = "$success", "$warning"
"""The styles of words that were guessed correctly, and of words from the model itself."""

_WORD = re.compile(r"\S+")
# Maximum number of characters of markup, such as the address of a link, between two words, and between two
# letters of a word.
_MAX_MARKUP, _MAX_INNER_MARKUP = 2000, 16


class OriginColours:
    """The origin of each character of a reply's Markdown text.

    The parser does not report where in the text a word comes from. The words are therefore searched in the
    text, each one after the word before it. Since the search finds the first place that is possible, it never
    skips the right place of a later word. A word that occurs in the markup before it can get the colour of
    the markup.

    Args:
        uncoloured: Number of characters at the start whose origin is unknown.
    """

    def __init__(self, uncoloured: int = 0) -> None:
        # The ends of the parts of the text with one style, and their styles.
        self._ends, self._styles = [uncoloured], [""]

    def add(self, text: str, *, accepted: bool) -> None:
        """Append text. `accepted` says whether it was guessed correctly."""
        style = GUESSED_STYLE if accepted else OWN_STYLE
        if self._styles[-1] != style:
            self._ends.append(self._ends[-1])
            self._styles.append(style)
        self._ends[-1] += len(text)

    def colour(self, blocks: Iterable[Block], markdown: str, first: int) -> None:
        """Colour blocks.

        Args:
            blocks: The blocks.
            markdown: The part of the text from which they were read.
            first: The index of the first character of this part.
        """
        place = 0

        def spans(plain: str) -> list[Span]:
            nonlocal place
            found: list[Span] = []
            for word in _WORD.finditer(plain):
                at = markdown.find(word[0], place, place + _MAX_MARKUP + len(word[0]))
                if at >= 0:
                    place = at + len(word[0])
                    self._add_spans(found, word.start(), first + at, len(word[0]))
                    continue
                # There is markup within the word.
                for index, letter in enumerate(word[0], word.start()):
                    at = markdown.find(letter, place, place + _MAX_INNER_MARKUP)
                    if at >= 0:
                        place = at + 1
                        self._add_spans(found, index, first + at, 1)
            return found

        for block in blocks:
            block.colour(spans)

    def _add_spans(self, spans: list[Span], start: int, at: int, length: int) -> None:
        """Add the spans of `length` characters from `start`, which are in the text from index `at` on."""
        end = at + length
        while at < end and (part := bisect_right(self._ends, at)) < len(self._ends):
            following = min(end, self._ends[part])
            style, stop = self._styles[part], start + following - at
            if style and spans and spans[-1].style == style:
                # Words with one origin share a span, with the spaces between them.
                spans[-1] = Span(spans[-1].start, stop, style)
            elif style:
                spans.append(Span(start, stop, style))
            start, at = stop, following
