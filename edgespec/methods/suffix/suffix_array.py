"""A suffix array over saved replies and the user's files, for looking up token sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, MAX_SAMPLED_OCCURRENCES
from edgespec.methods.suffix.tokens import SEPARATOR, TokenArray

__all__ = ["SuffixArray", "SuffixRange"]

# A range of suffix array entries: (first entry, entry after the last).
SuffixRange: TypeAlias = tuple[int, int]

# Store tokens as big-endian integers, so that comparing their bytes compares the tokens.
_TOKEN = np.dtype(">i4")


class SuffixArray:
    """A suffix array of reversed texts, in which all occurrences of a match are adjacent.

    Each position is sorted by the 32 tokens before it. Sorting uses prefix doubling (Manber and Myers 1990).
    A binary search finds the longest match. The index uses 8 bytes per token.

    Attributes:
        text: All texts, with separators around each, as big-endian int32 [n].
        token_count: Number of tokens, excluding separators.
    """

    def __init__(self, texts: Iterable[TokenArray]) -> None:
        edge = np.full(MAX_MATCH_TOKENS, SEPARATOR, np.int32)
        parts: list[TokenArray] = [edge]
        for text in texts:
            parts += (text, edge[:1])
        whole: TokenArray = np.concatenate([*parts, np.full(MAX_CONTINUATION_TOKENS, SEPARATOR, np.int32)])
        self._order = _sorted_positions(whole)
        self._positions = self._order.data
        # The tokens of all texts in reverse order, as bytes.
        self._reversed = whole[::-1].astype(_TOKEN).tobytes()
        self.text = np.frombuffer(self._reversed, _TOKEN)[::-1]
        self.token_count = int(np.count_nonzero(whole != SEPARATOR))

    @property
    def size_bytes(self) -> int:
        return len(self._reversed) + self._order.nbytes

    def matches(self, last_tokens: Sequence[int]) -> Iterator[tuple[int, SuffixRange]]:
        """Yield each suffix of `last_tokens` that occurs in the texts, longest first.

        Each suffix is given as its length and the range of its occurrences in the suffix array. If several
        suffixes have the same occurrences, only the longest is yielded.
        """
        key = np.array(last_tokens[-MAX_MATCH_TOKENS:][::-1], _TOKEN).tobytes()
        positions, reverse, size, width = self._positions, self._reversed, len(self._positions), len(key)
        end = len(reverse)

        def before(position: int) -> bytes:
            start = end - 4 * position
            return reverse[start : start + width]

        low = high = bisect_left(positions, key, key=before)
        while True:
            left = _shared_tokens(before(positions[low - 1]), key) if low else 0
            right = _shared_tokens(before(positions[high]), key) if high < size else 0
            length = max(left, right)
            if not length:
                return
            prefix = key[: 4 * length]
            if left == length:
                low = self._last_with_prefix(low - 1, -1, prefix)
            if right == length:
                high = self._last_with_prefix(high, 1, prefix) + 1
            yield length, (low, high)

    def _last_with_prefix(self, entry: int, step: int, prefix: bytes) -> int:
        positions, reverse, size = self._positions, self._reversed, len(self._positions)
        end, growing = len(reverse), True
        while step:
            candidate = entry + step
            if 0 <= candidate < size and reverse.startswith(prefix, end - 4 * positions[candidate]):
                entry = candidate
                if growing:
                    step *= 2
                    continue
            growing = False
            step = int(step / 2)
        return entry

    def continuations(self, matches: SuffixRange, count: int) -> list[list[int]]:
        """Return the tokens that follow a repeated text.

        Args:
            matches: Range of occurrences in the suffix array. If there are more than 64, an evenly spaced
                sample is used.
            count: Number of tokens per occurrence, at most MAX_CONTINUATION_TOKENS.

        Returns:
            One row of `count` tokens per occurrence. If a text ends earlier, its row is padded with
            separators.
        """
        low, high = matches
        if high - low == 1:
            position = self._positions[low]
            return [self.text[position : position + count].tolist()]
        positions = self._order[low : high : -(-(high - low) // MAX_SAMPLED_OCCURRENCES), None]
        rows: list[list[int]] = self.text[positions + np.arange(count)].tolist()
        return rows


def _shared_tokens(a: bytes, b: bytes) -> int:
    differing = (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_length()
    return len(b) // 4 - (differing + 31) // 32


def _sorted_positions(text: TokenArray) -> NDArray[np.int32]:
    rank = text.astype(np.int64) + 1
    rank[text == SEPARATOR] = int(rank.max()) + 1
    span = 1
    while span < MAX_MATCH_TOKENS:
        # Prefix doubling (Manber and Myers 1990): each pass doubles the number of tokens that determine the
        # rank.
        earlier = np.zeros_like(rank)
        earlier[span:] = rank[:-span]
        key = rank * (int(rank.max()) + 1) + earlier
        order = np.argsort(key)
        ordered = key[order]
        rank[order] = np.cumsum(np.concatenate(([0], ordered[1:] != ordered[:-1])))
        span *= 2
    has_both = np.flatnonzero((text[:-1] != SEPARATOR) & (text[1:] != SEPARATOR))
    return (has_both[np.argsort(rank[has_both], kind="stable")] + 1).astype(np.int32)
