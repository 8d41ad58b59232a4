"""Find the parts of a token sequence that have not been seen before.

A prompt repeats the chat so far, and often also begins like another chat. Storing only new parts saves disk
space. As in rsync, the known sequences are hashed in windows of a fixed length. Only one window in eight is
stored, but every window of a new sequence is looked up.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.suffix.tokens import SEPARATOR, TokenArray

__all__ = ["NoveltyFilter"]

# Sequences are compared by hashes of 32-token windows. A hash is stored for every eighth position.
_WINDOW, _STRIDE = 32, 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NoveltyFilter:
    """Finds the parts of token sequences that are new. Stores only hashes, about 1 byte per token.

    Args:
        max_tokens: Maximum number of tokens to store. If a new sequence would exceed this limit, all stored
            sequences are dropped first.
    """

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        self._max_hashes = max_tokens // _STRIDE
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, text: TokenArray) -> None:
        """Store hashes of a non-empty token sequence, so that `new_parts` recognises it later."""
        starts = np.append(np.arange(0, len(text), _STRIDE), len(text) - 1)
        new_hashes = np.unique(_hashes(_padded(text), starts))
        has_room = len(self._hashes) + len(new_hashes) <= self._max_hashes
        self._hashes = np.union1d(self._hashes, new_hashes) if has_room else new_hashes

    def new_parts(self, text: TokenArray) -> list[TokenArray]:
        """Return the parts of a token sequence that have not been added before, in order.

        Parts of fewer than 8 tokens are left out. Only the last part may be shorter or empty, because it
        always reaches the end of the sequence.
        """
        known = np.zeros(len(text) + _WINDOW, np.int64)
        if len(self._hashes):
            hashes = _hashes(_padded(text), np.arange(len(text)))
            nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            starts = np.flatnonzero(self._hashes[nearest] == hashes)
            known[starts] += 1
            known[starts + _WINDOW] -= 1
        is_new = np.cumsum(known)[_WINDOW - 1 :] == 0
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if is_new[a] and (b == len(text) or b - a >= _STRIDE)]


def _padded(text: TokenArray) -> TokenArray:
    return np.concatenate([np.full(_WINDOW - 1, SEPARATOR, np.int32), text])


def _hashes(text: TokenArray, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    values = (text.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(29)
    hashes = np.zeros(len(starts), np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * _MULTIPLIER + values[starts + i]
    return hashes
