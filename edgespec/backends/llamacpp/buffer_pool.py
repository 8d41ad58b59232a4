"""A pool of reusable buffers that hold copies of KV cells."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

# The maximum size of a pooled buffer. Larger ones are not worth pooling, because the whole cache is rarely
# copied, whereas a few cells are copied in every decoding round.
_MAX_POOLED_BYTES = 32 * 2**20


class BufferPool:
    """Hands out buffers and reuses their memory once they are no longer referenced.

    This avoids the page faults of a new allocation in every decoding round. Not thread-safe.
    """

    def __init__(self) -> None:
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._handed_out: list[weakref.ref[NDArray[np.uint8]]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialised uint8 buffer of shape [size]. It is not reused while referenced."""
        if size > _MAX_POOLED_BYTES:
            return np.empty(size, np.uint8)
        self._handed_out = [buffer for buffer in self._handed_out if buffer() is not None]
        start = self._used if self._handed_out else 0
        if start + size > len(self._bytes):
            # Buffers that are still in use are views of the old block, so NumPy keeps it alive.
            self._bytes = np.empty(min(_MAX_POOLED_BYTES, max(size, 2 * len(self._bytes))), np.uint8)
            self._handed_out, start = [], 0
        taken = self._bytes[start : start + size]
        self._handed_out.append(weakref.ref(taken))
        self._used = start + size
        return taken
