"""Trying what does not seem to pay, now and then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RetrySchedule"]


class RetrySchedule:
    """When what does not pay is to be tried: at once, soon again, and ever more rarely while it does not.

    first, most: rounds between two tries. Never more rarely than its price asks for: in the long run tries
    may cost less than a hundredth of the time, by which a text that changes its ways is noticed.
    """

    _SHARE = 0.0075

    def __init__(self, first: int = 4, most: int = 128) -> None:
        self._first, self._most = first, most
        self._interval = self._waited = first

    @property
    def rare(self) -> bool:
        """Has it been tried several times, and did not pay?"""
        return self._interval >= 8 * self._first

    def due(self, price: float) -> bool:
        """A round more in which it does not pay. True when it is to be tried in this one.

        price: what a try costs at worst, in plain steps.
        """
        self._waited += 1
        if self._waited < min(self._interval, max(self._first, price / self._SHARE)):
            return False
        self._interval, self._waited = min(2 * self._interval, self._most), 0
        return True

    def wait(self, rounds: int) -> None:
        """So many rounds more in which it does not pay."""
        self._waited += rounds

    def kept(self) -> NDArray[np.float64]:
        """How long it waits by now."""
        return np.array([self._interval])

    def restore(self, kept: NDArray[np.float64]) -> None:
        """Wait as long as it did in another run. Raises ValueError."""
        if kept.shape != (1,) or not self._first <= kept[0] <= self._most:
            raise ValueError(f"{kept} rounds are not between {self._first} and {self._most}")
        self._interval, self._waited = int(kept[0]), 0

    def promising(self) -> None:
        """It was tried, and did well: one more try decides."""
        self._waited = self._interval

    def paid(self) -> None:
        """It pays in this round: if it ever stops to, it is tried again soon."""
        self._interval, self._waited = max(self._interval // 2, self._first), 0
