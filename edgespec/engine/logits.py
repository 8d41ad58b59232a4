"""The logits of one pass, where the backend keeps them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["HostLogits", "Logits"]


class Logits(Protocol):
    """Rows of logits, one for each node of a pass. Valid until the backend's next pass.

    The sampler asks for the least it can do with, so that a backend may filter where the logits are
    and hand over candidates instead of whole rows.
    """

    vocab_size: int

    def __len__(self) -> int:
        """How many rows there are."""

    def greedy(self, row: int) -> int:
        """The id of the largest logit of a row, the lowest id on ties."""

    def top(self, row: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """At least the `count` largest logits of a row, ties included: (ids ascending, logits)."""

    def above(self, row: int, margin: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Every logit of a row within `margin` of its largest: (ids ascending, logits)."""

    def limited(self, vocab_size: int) -> Logits:
        """The same rows without the ids from `vocab_size` on."""

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits of `tokens` (int64 [n]) in a row: float64 [n]."""


class HostLogits:
    """Logits in ordinary memory: float32 [rows, vocab], a view that is never copied whole."""

    __slots__ = ("rows", "vocab_size")

    _BLOCK = 64

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.rows = rows
        self.vocab_size = rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def greedy(self, row: int) -> int:
        return int(self.rows[row].argmax())

    def top(self, row: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        logits = self.rows[row]
        blocks = len(logits) // self._BLOCK
        if count <= 0 or blocks <= count:
            if 0 < count < len(logits):
                floor = np.partition(logits, len(logits) - count)[len(logits) - count]
                return self._from(logits, floor)
            return np.arange(len(logits)), logits.astype(np.float64)
        # In interleaved blocks, the count-th largest block maximum is no larger than the count-th largest
        # logit: a floor for two cheap passes, where a partition of the row would cost a millisecond.
        peaks = logits[: blocks * self._BLOCK].reshape(self._BLOCK, blocks).max(axis=0)
        return self._from(logits, np.partition(peaks, blocks - count)[blocks - count])

    def above(self, row: int, margin: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        logits = self.rows[row]
        # Rounded down, or a logit at the very edge would be lost.
        return self._from(logits, np.nextafter(np.float32(float(logits.max()) - margin), np.float32(-np.inf)))

    def limited(self, vocab_size: int) -> HostLogits:
        return self if vocab_size >= self.vocab_size else HostLogits(self.rows[:, :vocab_size])

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.rows[row][tokens].astype(np.float64)
        return values

    @staticmethod
    def _from(
        logits: NDArray[np.float32], floor: np.float32
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        ids = np.flatnonzero(logits >= floor)
        return ids, logits[ids].astype(np.float64)
