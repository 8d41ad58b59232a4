"""Running statistics that weigh recent values most."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["AcceptanceCounts", "RunningMean"]

# Values after which a new one is weighed as 1/10, so the mean follows changes within about ten values.
_MEAN_VALUES = 10
# Weight of a mean restored from an earlier run, in values: this run's first values soon outweigh it.
_MAX_RESTORED_COUNT = 5


class RunningMean:
    """A mean of roughly the last ten values.

    Attributes:
        value: The mean, in the unit of the values; 0 before the first value.
        count: Number of values added.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Add a value. The first ten values weigh the same; later ones weigh a tenth."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEAN_VALUES)

    def saved(self) -> NDArray[np.float64]:
        """Return the mean and the count, float64 [2], for a later run."""
        return np.array([self.value, self.count])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Continue from the array of `saved`.

        Raises:
            ValueError: The array is not a finite mean with a count.
        """
        if saved.shape != (2,) or not np.isfinite(saved).all() or saved[1] < 0.0:
            raise ValueError(f"saved mean {saved} is not a finite value with a count")
        value, count = map(float, saved)
        self.value, self.count = value, min(int(count), _MAX_RESTORED_COUNT)


class AcceptanceCounts:
    """Drafted and accepted tokens of several categories, with older tokens weighing less.

    The counts exist twice: with a short memory, which `accepted` and `drafted` hold, and with a long one,
    which `limit_weight` falls back to.

    Args:
        accepted: Prior count of accepted tokens per category, float64.
        drafted: Prior count of drafted tokens per category, of the same shape.

    Attributes:
        accepted: Accepted tokens per category, decayed.
        drafted: Drafted tokens per category, decayed.
    """

    # Weight kept per further token of the category: half of a token's weight is gone after 34 more.
    DECAY = 0.98
    _LONG_DECAY = 0.998

    def __init__(self, accepted: NDArray[np.float64], drafted: NDArray[np.float64]) -> None:
        self._prior = accepted, drafted
        self.accepted, self.drafted = accepted.copy(), drafted.copy()
        self._long_accepted, self._long_drafted = accepted.copy(), drafted.copy()

    def record(self, category: tuple[int, ...], accepted: bool) -> None:
        """Count one drafted token of a category, given as an index into the arrays."""
        self.drafted[category] = self.drafted[category] * self.DECAY + 1.0
        self.accepted[category] = self.accepted[category] * self.DECAY + accepted
        self._long_drafted[category] = self._long_drafted[category] * self._LONG_DECAY + 1.0
        self._long_accepted[category] = self._long_accepted[category] * self._LONG_DECAY + accepted

    def saved(self) -> NDArray[np.float64]:
        """Return all counts for a later run, float64 [4, ...]."""
        return np.stack([self.accepted, self.drafted, self._long_accepted, self._long_drafted])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Continue from the array of `saved`.

        Raises:
            ValueError: The shape differs, or the counts are impossible.
        """
        expected = (4, *self.accepted.shape)
        if saved.shape != expected or not np.isfinite(saved).all() or (saved < 0.0).any():
            raise ValueError(f"saved acceptance counts of shape {saved.shape} do not fit {expected}")
        if (saved[0] > saved[1] + 1e-6).any() or (saved[2] > saved[3] + 1e-6).any():
            raise ValueError("saved acceptance counts have more accepted than drafted tokens")
        self.accepted, self.drafted, self._long_accepted, self._long_drafted = saved.astype(np.float64)

    def limit_weight(self, max_drafted: float) -> None:
        """Replace the recent rates by the long-term ones, with the weight of at most `max_drafted` tokens.

        Called after a pause in which the text may have changed.
        """
        np.minimum(self.drafted, max_drafted, out=self.drafted)
        np.divide(
            self._long_accepted * self.drafted,
            self._long_drafted,
            out=self.accepted,
            where=self._long_drafted > 0.0,
        )

    def decay(self, weight: float = DECAY) -> None:
        """Move the counts back towards their prior by the share 1 - `weight`."""
        for counts, prior in zip((self.accepted, self.drafted), self._prior, strict=True):
            counts += (prior - counts) * (1.0 - weight)
