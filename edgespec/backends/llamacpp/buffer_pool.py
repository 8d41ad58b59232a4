"""Memory for copies of cells, used again and again."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

# More is not kept: a whole cache is saved now and then only, a few cells all the time.
_MAX_POOLED_BYTES = 32 * 2**20


class BufferPool:
    """Gives out bytes, and gives them out again when nobody holds any of them."""

    def __init__(self) -> None:
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._given: list[weakref.ref[NDArray[np.uint8]]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, not set, uint8 [size]: nobody else is given them while they are held."""
        if size > _MAX_POOLED_BYTES:
            return np.empty(size, np.uint8)
        self._given = [given for given in self._given if given() is not None]
        start = self._used if self._given else 0
        if start + size > len(self._bytes):
            # Those given out keep the former bytes alive.
            self._bytes = np.empty(min(_MAX_POOLED_BYTES, max(size, 2 * len(self._bytes))), np.uint8)
            self._given, start = [], 0
        taken = self._bytes[start : start + size]
        self._given.append(weakref.ref(taken))
        self._used = start + size
        return taken
