"""Reused buffers for copies of KV cells."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

# Larger buffers are allocated on their own. Chosen: copies of whole caches are rare, small copies are made in
# every round.
_MAX_POOLED_BYTES = 32 * 2**20


class BufferPool:
    """Hands out buffers and reuses their memory after nobody holds a reference to them.

    Saves the page faults of a new allocation in every round. Used by one thread.
    """

    def __init__(self) -> None:
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._handed_out: list[weakref.ref[NDArray[np.uint8]]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialised buffer, uint8 [size], that nobody else uses while it is referenced."""
        if size > _MAX_POOLED_BYTES:
            return np.empty(size, np.uint8)
        self._handed_out = [buffer for buffer in self._handed_out if buffer() is not None]
        start = self._used if self._handed_out else 0
        if start + size > len(self._bytes):
            # Buffers in use keep the old block alive through their numpy base.
            self._bytes = np.empty(min(_MAX_POOLED_BYTES, max(size, 2 * len(self._bytes))), np.uint8)
            self._handed_out, start = [], 0
        taken = self._bytes[start : start + size]
        self._handed_out.append(weakref.ref(taken))
        self._used = start + size
        return taken
