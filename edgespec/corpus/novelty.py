"""What a text adds to those before it: a chat's prompt repeats the chat, and often another one's beginning.

The idea is rsync's: of what is known some windows are kept as hashes, and every window of a new text is
looked up among them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.token_buffer import SEPARATOR, TokenArray

__all__ = ["NoveltyFilter"]

# A stretch is known by windows of so many tokens, of which every so-manieth is kept.
_WINDOW, _STRIDE = 32, 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NoveltyFilter:
    """Texts by the hashes of their windows: a byte a token; some are forgotten beyond `most_tokens`."""

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        self._most = most_tokens // _STRIDE
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return self._hashes.nbytes

    def add(self, text: TokenArray) -> None:
        """Know a text, of one token at least."""
        starts = np.append(np.arange(0, len(text), _STRIDE), len(text) - 1)
        fresh = np.unique(_hashes(_after_edge(text), starts))
        kept = self._hashes if len(self._hashes) + len(fresh) <= self._most else self._hashes[:0]
        self._hashes = np.union1d(kept, fresh)

    def new(self, text: TokenArray) -> list[TokenArray]:
        """The stretches of a text that are not known, in their order, without those too short to matter.

        The last one reaches to the end of the text, and is empty where that is known.
        """
        known = np.zeros(len(text) + _WINDOW, np.int64)
        if len(self._hashes):
            hashes = _hashes(_after_edge(text), np.arange(len(text)))
            at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            starts = np.flatnonzero(self._hashes[at] == hashes)
            known[starts] += 1
            known[starts + _WINDOW] -= 1
        # Position by position, and new again after the end.
        is_new = np.cumsum(known)[_WINDOW - 1 :] == 0
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if is_new[a] and (b == len(text) or b - a >= _STRIDE)]


def _after_edge(text: TokenArray) -> TokenArray:
    """With as many separators before it as give its first token a window."""
    return np.concatenate([np.full(_WINDOW - 1, SEPARATOR, np.int32), text])


def _hashes(text: TokenArray, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Of the windows that begin there."""
    values = (text.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(29)
    hashes = np.zeros(len(starts), np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * _MULTIPLIER + values[starts + i]
    return hashes
