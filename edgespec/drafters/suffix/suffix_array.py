"""An index of texts that do not change: earlier chats, and files a person works on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.token_buffer import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, SEPARATOR, TokenArray

__all__ = ["SuffixArray", "SuffixRange"]

# Which entries of an index: the first, and the one after the last.
SuffixRange: TypeAlias = tuple[int, int]

# How many occurrences of one match are counted.
MAX_SAMPLED_OCCURRENCES = 64
_TOKEN = np.dtype(">i4")
# Ranges from this size on are kept, so many of them at most.
_LARGE, _MOST_KEPT = 64, 1 << 12


class SuffixArray:
    """A suffix array over reversed texts: the occurrences of any last tokens are one range of it.

    Sorted by the MAX_MATCH_TOKENS tokens before each position by prefix doubling (Manber and Myers 1990),
    which takes log2(MAX_MATCH_TOKENS) sorts of all n tokens, and 8 bytes for each. One binary search finds
    where the last tokens would stand: the longest match is beside it, and shorter ones around that.
    text: big-endian int32 [n], the texts with separators around them. tokens: how many they have together.
    """

    def __init__(self, texts: Iterable[TokenArray]) -> None:
        edge = np.full(MAX_MATCH_TOKENS, SEPARATOR, np.int32)
        parts: list[TokenArray] = [edge]
        for text in texts:
            parts += (text, edge[:1])
        whole: TokenArray = np.concatenate([*parts, np.full(MAX_CONTINUATION_TOKENS, SEPARATOR, np.int32)])
        self._order = _order(whole)
        self._places = self._order.data
        # Reversed and big-endian: bytes compare as the tokens before a position do, the nearest first.
        self._reversed = whole[::-1].astype(_TOKEN).tobytes()
        self.text = np.frombuffer(self._reversed, _TOKEN)[::-1]
        self.tokens = int(np.count_nonzero(whole != SEPARATOR))
        self._large: dict[bytes, SuffixRange] = {}

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return len(self._reversed) + self._order.nbytes

    def matches(self, recent: Sequence[int]) -> Iterator[tuple[int, SuffixRange]]:
        """Where endings of `recent` stand and something follows, with their lengths, the longest first.

        Of several lengths with the same occurrences only the longest is there.
        """
        key = np.array(recent[-MAX_MATCH_TOKENS:][::-1], _TOKEN).tobytes()
        places, reverse, size, width = self._places, self._reversed, len(self._places), len(key)
        end = len(reverse)

        def before(place: int) -> bytes:
            start = end - 4 * place
            return reverse[start : start + width]

        low = high = bisect_left(places, key, key=before)
        while True:
            # How many bytes of the key stand just outside, on either side.
            left = _shared(before(places[low - 1]), key) if low else 0
            right = _shared(before(places[high]), key) if high < size else 0
            length = max(left, right)
            if not length:
                return
            prefix = key[: 4 * length]
            known = self._large.get(prefix)
            if known is None:
                if left == length:
                    low = self._reach(low - 1, -1, prefix)
                if right == length:
                    high = self._reach(high, 1, prefix) + 1
                if high - low >= _LARGE:
                    self._keep(prefix, (low, high))
            else:
                low, high = known
            yield length, (low, high)

    def _reach(self, at: int, step: int, prefix: bytes) -> int:
        """The last entry that has the prefix, going from `at`, which does: further and further, then back."""
        places, reverse, size = self._places, self._reversed, len(self._places)
        end, growing = len(reverse), True
        while step:
            there = at + step
            if 0 <= there < size and reverse.startswith(prefix, end - 4 * places[there]):
                at = there
                if growing:
                    step *= 2
                    continue
            growing = False
            step = int(step / 2)
        return at

    def _keep(self, prefix: bytes, where: SuffixRange) -> None:
        if len(self._large) >= _MOST_KEPT:
            self._large.clear()
        self._large[prefix] = where

    def rows(self, where: SuffixRange, count: int) -> list[list[int]]:
        """Return the `count` tokens that follow each entry of a range; sample a large range evenly."""
        low, high = where
        if high - low == 1:
            place = self._places[low]
            return [self.text[place : place + count].tolist()]
        places = self._order[low : high : -(-(high - low) // MAX_SAMPLED_OCCURRENCES), None]
        rows: list[list[int]] = self.text[places + np.arange(count)].tolist()
        return rows


def _shared(a: bytes, b: bytes) -> int:
    """How many tokens two equally long keys begin with in common."""
    differing = (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_length()
    return len(b) // 4 - (differing + 31) // 32


def _order(text: TokenArray) -> NDArray[np.int32]:
    """The positions with a token before and after, sorted by the tokens before them, the nearest first."""
    rank = text.astype(np.int64) + 1
    # As in unsigned bytes the separator comes last.
    rank[text == SEPARATOR] = int(rank.max()) + 1
    span = 1
    while span < MAX_MATCH_TOKENS:
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
