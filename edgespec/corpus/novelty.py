"""Detect the parts of a token sequence that were not seen before.

A prompt repeats the chat so far, and often the beginning of another chat. Storing only the new parts keeps
the saved replies small. As in rsync, some windows of the known sequences are stored as hashes, and every
window of a new sequence is looked up among them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.token_buffer import SEPARATOR, TokenArray

__all__ = ["NoveltyFilter"]

# Tokens per hashed window, and the distance of stored windows. Chosen.
_WINDOW, _STRIDE = 32, 8
# An odd 64-bit constant with mixed bits: 2^64 divided by the golden ratio.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NoveltyFilter:
    """Set of known token sequences, stored as hashes of their windows: one byte per token.

    Args:
        max_tokens: Once more than this would be stored, all earlier sequences are dropped.
    """

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        self._max_hashes = max_tokens // _STRIDE
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        """Memory of the hashes in bytes."""
        return self._hashes.nbytes

    def add(self, text: TokenArray) -> None:
        """Add a sequence of at least one token."""
        starts = np.append(np.arange(0, len(text), _STRIDE), len(text) - 1)
        new_hashes = np.unique(_hashes(_padded(text), starts))
        has_room = len(self._hashes) + len(new_hashes) <= self._max_hashes
        self._hashes = np.union1d(self._hashes, new_hashes) if has_room else new_hashes

    def new_parts(self, text: TokenArray) -> list[TokenArray]:
        """Return the unknown parts of a sequence in order, without parts shorter than the stride.

        The last part always reaches to the end of the sequence. It is empty where the end is known.
        """
        known = np.zeros(len(text) + _WINDOW, np.int64)
        if len(self._hashes):
            hashes = _hashes(_padded(text), np.arange(len(text)))
            nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            starts = np.flatnonzero(self._hashes[nearest] == hashes)
            known[starts] += 1
            known[starts + _WINDOW] -= 1
        # A position is new where no known window covers it. One position is added after the end, always new.
        is_new = np.cumsum(known)[_WINDOW - 1 :] == 0
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if is_new[a] and (b == len(text) or b - a >= _STRIDE)]


def _padded(text: TokenArray) -> TokenArray:
    """Return the text with enough separators before it for a window that ends with its first token."""
    return np.concatenate([np.full(_WINDOW - 1, SEPARATOR, np.int32), text])


def _hashes(text: TokenArray, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes of the windows that begin at `starts`."""
    values = (text.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(29)
    hashes = np.zeros(len(starts), np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * _MULTIPLIER + values[starts + i]
    return hashes
