"""Running statistics in which recent values have the most weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["AcceptanceCounts", "RunningMean"]

# Every new value has a weight of at least 1/10, so that the mean adapts within about ten values.
_MEAN_VALUES = 10
# A mean restored from an earlier run counts as at most this many values, so that new values soon outweigh it.
_MAX_RESTORED_COUNT = 5


class RunningMean:
    """A running mean of roughly the last ten values.

    Attributes:
        value: The mean, in the unit of the values; 0 before the first value.
        count: Number of values added so far.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Add a value. The first ten values have equal weight; each later value has a weight of 1/10."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEAN_VALUES)

    def saved(self) -> NDArray[np.float64]:
        """Return a float64 array [2] with the mean and the count, to save for a later run."""
        return np.array([self.value, self.count])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the array returned by `saved`. Raises ValueError if it is invalid."""
        if saved.shape != (2,) or not np.isfinite(saved).all() or saved[1] < 0.0:
            raise ValueError(f"the saved array must consist of a finite mean and a count, not {saved}")
        value, count = map(float, saved)
        self.value, self.count = value, min(int(count), _MAX_RESTORED_COUNT)


class AcceptanceCounts:
    """Counts of drafted and accepted tokens per category, such as per tree rank, with exponential decay.

    Every token is counted twice: with fast decay in `accepted` and `drafted`, and with slow decay for the
    long-term acceptance rates. These replace the recent rates when drafting resumes after a pause.

    Args:
        accepted: Initial number of accepted tokens per category, float64.
        drafted: Initial number of drafted tokens per category, with the same shape.

    Attributes:
        accepted: Decayed count of accepted tokens per category.
        drafted: Decayed count of drafted tokens per category.
    """

    # Factor applied to a category's counts before each new token is added. With 0.98, a token loses half of
    # its weight after 34 further tokens.
    DECAY = 0.98
    # The same factor for the counts behind the long-term acceptance rates.
    _LONG_DECAY = 0.998

    def __init__(self, accepted: NDArray[np.float64], drafted: NDArray[np.float64]) -> None:
        self._prior = accepted, drafted
        self.accepted, self.drafted = accepted.copy(), drafted.copy()
        self._long_accepted, self._long_drafted = accepted.copy(), drafted.copy()

    def record(self, category: tuple[int, ...], accepted: bool) -> None:
        """Count a drafted token in a category, which is an index into the arrays of counts."""
        self.drafted[category] = self.drafted[category] * self.DECAY + 1.0
        self.accepted[category] = self.accepted[category] * self.DECAY + accepted
        self._long_drafted[category] = self._long_drafted[category] * self._LONG_DECAY + 1.0
        self._long_accepted[category] = self._long_accepted[category] * self._LONG_DECAY + accepted

    def saved(self) -> NDArray[np.float64]:
        """Return all counts as a float64 array [4, ...] to save for a later run."""
        return np.stack([self.accepted, self.drafted, self._long_accepted, self._long_drafted])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the array returned by `saved`. Raises ValueError if it is invalid."""
        expected = (4, *self.accepted.shape)
        if saved.shape != expected or not np.isfinite(saved).all() or (saved < 0.0).any():
            raise ValueError(
                f"expected finite acceptance counts of shape {expected}, but got shape {saved.shape}"
            )
        if (saved[0] > saved[1] + 1e-6).any() or (saved[2] > saved[3] + 1e-6).any():
            raise ValueError("saved acceptance counts contain more accepted than drafted tokens")
        self.accepted, self.drafted, self._long_accepted, self._long_drafted = saved.astype(np.float64)

    def limit_weight(self, max_drafted: float) -> None:
        """Replace recent acceptance rates with long-term rates that count as at most `max_drafted` tokens.

        Called when drafting resumes after a pause, because recent rates might no longer apply.
        """
        np.minimum(self.drafted, max_drafted, out=self.drafted)
        accepted = self._long_accepted * self.drafted
        np.divide(accepted, self._long_drafted, out=self.accepted, where=self._long_drafted > 0.0)

    def decay(self, weight: float = DECAY) -> None:
        """Move the counts towards their initial values by a fraction of 1 - `weight`."""
        for counts, prior in zip((self.accepted, self.drafted), self._prior, strict=True):
            counts += (prior - counts) * (1.0 - weight)
