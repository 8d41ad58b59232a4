"""An index of texts that do not change: earlier replies, and files a person works on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.text import (
    DEEPEST,
    FEW,
    LONGEST,
    SAMPLE,
    SEPARATOR,
    Match,
    Tokens,
    nested_matches,
)

__all__ = ["TextIndex"]


class TextIndex:
    """A suffix array over reversed texts: the occurrences of any last tokens are one range of it.

    Sorted by the LONGEST tokens before each position by prefix doubling (Manber and Myers 1990), which takes
    log2(LONGEST) sorts of all n tokens, and 8 bytes for each. Narrowing a range token by token gives every
    match length, with two binary searches a token: O(log n) each.
    text: int32 [n], the texts with separators around them. tokens: how many they have together.
    """

    def __init__(self, texts: Iterable[Tokens]) -> None:
        edge = np.full(LONGEST, SEPARATOR, np.int32)
        parts: list[Tokens] = [edge]
        for text in texts:
            parts += (text, edge[:1])
        self.text: Tokens = np.concatenate([*parts, np.full(DEEPEST, SEPARATOR, np.int32)])
        self._order = _order(self.text)
        self.tokens = int(np.count_nonzero(self.text != SEPARATOR))

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return self.text.nbytes + self._order.nbytes

    def matches(self, recent: Tokens) -> list[Match]:
        """Where the beginnings of `recent` (last token first) stand and something follows, shortest first.

        Of several lengths with the same occurrences only the longest is there. Of too many occurrences an
        even sample is kept.
        """
        tokens, places = self.text.data, self._order.data
        low, high = 0, len(places)
        sets: list[tuple[int, Match]] = []
        for back, token in enumerate(recent.tolist(), 1):

            def before(place: int, back: int = back) -> int:
                return tokens[place - back]

            low = bisect_left(places, token, low, high, key=before)
            high = bisect_right(places, token, low, high, key=before)
            if high - low <= FEW:
                return nested_matches(self.text, recent, sets, self._order[low:high].astype(np.int64))
            sets.append((high - low, Match(back, self._sample(low, high))))
        return nested_matches(self.text, recent, sets, np.empty(0, np.int64))

    def _sample(self, low: int, high: int) -> NDArray[np.int64]:
        return self._order[low : high : -(-(high - low) // SAMPLE)].astype(np.int64)


def _order(text: Tokens) -> NDArray[np.int32]:
    """The positions with a token before and after, sorted by the tokens before them, the nearest first."""
    rank = text.astype(np.int64) + 1
    span = 1
    while span < LONGEST:
        # Equal ranks are equal over `span` tokens; joined with what stands before those, over twice as many.
        earlier = np.zeros_like(rank)
        earlier[span:] = rank[:-span]
        key = rank * (int(rank.max()) + 1) + earlier
        order = np.argsort(key)
        ordered = key[order]
        rank[order] = np.cumsum(np.concatenate(([0], ordered[1:] != ordered[:-1])))
        span *= 2
    # Entry i of rank is about the tokens up to and with i: they stand before position i + 1.
    has_both = np.flatnonzero((text[:-1] != SEPARATOR) & (text[1:] != SEPARATOR))
    return (has_both[np.argsort(rank[has_both], kind="stable")] + 1).astype(np.int32)
