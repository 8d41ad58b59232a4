"""Find the parts of a token sequence that have not been seen before.

A prompt repeats the chat so far, and often the beginning of another chat. Storing only new parts saves disk
space. As in rsync, hashes are stored for some windows of the known sequences, and every window of a new
sequence is looked up among them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.token_buffer import SEPARATOR, TokenArray

__all__ = ["NoveltyFilter"]

# Number of tokens per hashed window, and the distance between stored windows. Both are heuristics.
_WINDOW, _STRIDE = 32, 8
# Multiplier for hashing: 2^64 divided by the golden ratio, rounded to an odd number.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NoveltyFilter:
    """A set of known token sequences, stored as window hashes that take about one byte per token.

    Args:
        max_tokens: Maximum number of tokens to store. If a sequence would exceed it, all others are dropped
            first.
    """

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        self._max_hashes = max_tokens // _STRIDE
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        """Memory used by the hashes in bytes."""
        return self._hashes.nbytes

    def add(self, text: TokenArray) -> None:
        """Add a sequence of at least one token."""
        starts = np.append(np.arange(0, len(text), _STRIDE), len(text) - 1)
        new_hashes = np.unique(_hashes(_padded(text), starts))
        has_room = len(self._hashes) + len(new_hashes) <= self._max_hashes
        self._hashes = np.union1d(self._hashes, new_hashes) if has_room else new_hashes

    def new_parts(self, text: TokenArray) -> list[TokenArray]:
        """Return the unknown parts of a sequence in order, omitting parts shorter than the stride.

        The last part always extends to the end of the sequence. It is empty if the end is already known.
        """
        known = np.zeros(len(text) + _WINDOW, np.int64)
        if len(self._hashes):
            hashes = _hashes(_padded(text), np.arange(len(text)))
            nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            starts = np.flatnonzero(self._hashes[nearest] == hashes)
            known[starts] += 1
            known[starts + _WINDOW] -= 1
        # A position is new if no known window covers it. An extra position after the end always counts as
        # new.
        is_new = np.cumsum(known)[_WINDOW - 1 :] == 0
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if is_new[a] and (b == len(text) or b - a >= _STRIDE)]


def _padded(text: TokenArray) -> TokenArray:
    """Prepend enough separators that a window can end at the first token."""
    return np.concatenate([np.full(_WINDOW - 1, SEPARATOR, np.int32), text])


def _hashes(text: TokenArray, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes of the windows that start at `starts`."""
    values = (text.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(29)
    hashes = np.zeros(len(starts), np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * _MULTIPLIER + values[starts + i]
    return hashes
