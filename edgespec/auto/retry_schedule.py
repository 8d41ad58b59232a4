"""Schedule for retrying a drafter that currently does not save time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RetrySchedule"]

# Maximum share of the decoding time to spend in the long run on retrying drafters that save no time.
_RETRY_SHARE = 0.0075
# Factor by which the retry interval must have grown for retries to count as rare.
_RARE_FACTOR = 8


class RetrySchedule:
    """Decides in which rounds to retry a drafter, with an interval that doubles after each retry.

    Cheap retries can take place before the interval ends, as long as retries take less than 0.75 % of the
    decoding time in total. This way, changes in the text are noticed early if retries are cheap.

    Args:
        min_interval: Rounds between the first two retries.
        max_interval: Maximum number of rounds between retries, reached after many have failed.
    """

    def __init__(self, min_interval: int = 4, max_interval: int = 128) -> None:
        self._min_interval, self._max_interval = min_interval, max_interval
        self._interval = self._waited = min_interval

    @property
    def is_rare(self) -> bool:
        """Whether retries are rare, because several in a row saved no time."""
        return self._interval >= _RARE_FACTOR * self._min_interval

    def is_due(self, cost: float) -> bool:
        """Count a round without the drafter, and return whether to retry the drafter in this round.

        Args:
            cost: Expected cost of a retry, in target steps.
        """
        self._waited += 1
        if self._waited < min(self._interval, max(self._min_interval, cost / _RETRY_SHARE)):
            return False
        self._interval, self._waited = min(2 * self._interval, self._max_interval), 0
        return True

    def skip_rounds(self, rounds: int) -> None:
        """Count `rounds` rounds towards the next retry, in place of calls to `is_due`."""
        self._waited += rounds

    def retry_next_round(self) -> None:
        """Let the drafter run again in the next round, because its last draft was accepted in full."""
        self._waited = self._interval

    def shorten(self) -> None:
        """Halve the number of rounds between retries, because drafting saved time."""
        self._interval, self._waited = max(self._interval // 2, self._min_interval), 0

    def saved(self) -> NDArray[np.float64]:
        """Return the number of rounds between retries as float64 [1] to save for a later run."""
        return np.array([self._interval])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the retry interval from an earlier run. Raises ValueError if it is out of range."""
        if saved.shape != (1,) or not self._min_interval <= saved[0] <= self._max_interval:
            limits = f"{self._min_interval} to {self._max_interval}"
            raise ValueError(f"the saved retry interval must be {limits} rounds, not {saved}")
        self._interval, self._waited = int(saved[0]), 0
