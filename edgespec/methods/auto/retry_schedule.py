"""Schedule for retrying a drafter that currently does not save time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.auto.constants import MAX_RETRY_INTERVAL, MIN_RETRY_INTERVAL, RARE_FACTOR, RETRY_SHARE

__all__ = ["RetrySchedule"]


class RetrySchedule:
    """Decides when to retry a drafter. The interval doubles after each retry.

    Cheap retries may come earlier, as long as all retries together take less than 0.75 % of the decoding
    time.

    Args:
        min_interval: Number of rounds between the first two retries.
        max_interval: Maximum number of rounds between retries, reached after many failures.
    """

    def __init__(
        self, min_interval: int = MIN_RETRY_INTERVAL, max_interval: int = MAX_RETRY_INTERVAL
    ) -> None:
        self._min_interval, self._max_interval = min_interval, max_interval
        self._interval = self._waited = min_interval

    @property
    def is_rare(self) -> bool:
        """Whether retries are rare because several in a row saved no time."""
        return self._interval >= RARE_FACTOR * self._min_interval

    def is_due(self, cost: float) -> bool:
        """Count a round, and return whether to retry the drafter in it.

        Args:
            cost: Expected duration of a retry, relative to a single-token target pass.
        """
        self._waited += 1
        if self._waited < min(self._interval, max(self._min_interval, cost / RETRY_SHARE)):
            return False
        self._interval, self._waited = min(2 * self._interval, self._max_interval), 0
        return True

    def is_affordable(self, cost: float) -> bool:
        """Count a round, and return whether to try the drafter in it instead of a better one.

        Unlike `is_due`, this returns False until `cost` is at most 0.75 % of the decoding time, however long
        that takes. A draft model that must first process a long prompt may not be tried in the same reply at
        all.
        """
        self._waited += 1
        if self._waited < max(self._min_interval, cost / RETRY_SHARE):
            return False
        self._waited = 0
        return True

    def skip_rounds(self, rounds: int) -> None:
        self._waited += rounds

    def retry_next_round(self) -> None:
        self._waited = self._interval

    def shorten(self) -> None:
        """Halve the interval between retries of the drafter."""
        self._interval, self._waited = max(self._interval // 2, self._min_interval), 0

    def saved(self) -> NDArray[np.float64]:
        """Return the retry interval as a one-element array."""
        return np.array([self._interval])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the retry interval from the result of `saved`. Raises ValueError if it is invalid."""
        if saved.shape != (1,) or not self._min_interval <= saved[0] <= self._max_interval:
            limits = f"{self._min_interval} to {self._max_interval}"
            raise ValueError(f"the saved interval for retrying a drafter is {saved}, but must be {limits}")
        self._interval, self._waited = int(saved[0]), 0
