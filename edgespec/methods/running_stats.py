"""Running statistics that give the most weight to recent values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.constants import (
    ACCEPTANCE_DECAY,
    LONG_ACCEPTANCE_DECAY,
    MAX_RESTORED_COUNT,
    MEAN_VALUES,
)

__all__ = ["AcceptanceCounts", "RunningMean"]


class RunningMean:
    """A running mean of roughly the last ten values.

    Attributes:
        value: The mean, in the unit of the values. 0 before the first value.
        count: Number of values added so far.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Add a value. The first ten values have equal weight, and each later one has a weight of 1/10."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, MEAN_VALUES)

    def saved(self) -> NDArray[np.float64]:
        """Return the mean and the number of values as a float64 array [2], to be saved for later runs."""
        return np.array([self.value, self.count])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the mean from an array returned by `saved`. Raises ValueError if the array is invalid."""
        if saved.shape != (2,) or not np.isfinite(saved).all() or saved[1] < 0.0:
            raise ValueError(
                "the saved statistics are damaged: a running mean must consist of a finite mean and a count,"
                f" not {saved}"
            )
        value, count = map(float, saved)
        self.value, self.count = value, min(int(count), MAX_RESTORED_COUNT)


class AcceptanceCounts:
    """Counts drafted and accepted tokens per category, giving recent tokens the most weight.

    Also keeps long-term counts, which decay more slowly.

    Args:
        accepted: Initial number of accepted tokens per category, float64.
        drafted: Initial number of drafted tokens per category, with the same shape.

    Attributes:
        accepted: Decayed count of accepted tokens per category.
        drafted: Decayed count of drafted tokens per category.
    """

    def __init__(self, accepted: NDArray[np.float64], drafted: NDArray[np.float64]) -> None:
        self._prior = accepted, drafted
        self.accepted, self.drafted = accepted.copy(), drafted.copy()
        self._long_accepted, self._long_drafted = accepted.copy(), drafted.copy()

    def record(self, category: tuple[int, ...], accepted: bool) -> None:
        self.drafted[category] = self.drafted[category] * ACCEPTANCE_DECAY + 1.0
        self.accepted[category] = self.accepted[category] * ACCEPTANCE_DECAY + accepted
        self._long_drafted[category] = self._long_drafted[category] * LONG_ACCEPTANCE_DECAY + 1.0
        self._long_accepted[category] = self._long_accepted[category] * LONG_ACCEPTANCE_DECAY + accepted

    def long_term_rates(self, prior_weight: float) -> NDArray[np.float64]:
        """Return the long-term acceptance rate per category.

        The initial rates count as much as `prior_weight` drafted tokens.
        """
        accepted, drafted = self._prior
        sums = self._long_accepted + prior_weight * accepted / drafted
        rates: NDArray[np.float64] = sums / (self._long_drafted + prior_weight)
        return rates

    def saved(self) -> NDArray[np.float64]:
        """Return the recent and long-term counts as a float64 array, to be saved for later runs."""
        return np.stack([self.accepted, self.drafted, self._long_accepted, self._long_drafted])

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Restore the counts from an array returned by `saved`. Raises ValueError if the array is invalid."""
        expected = (4, *self.accepted.shape)
        if saved.shape != expected or not np.isfinite(saved).all() or (saved < 0.0).any():
            raise ValueError(
                "the saved statistics are damaged: acceptance counts must be finite and have shape"
                f" {expected}, not {saved.shape}"
            )
        if (saved[0] > saved[1] + 1e-6).any() or (saved[2] > saved[3] + 1e-6).any():
            raise ValueError("the saved statistics are damaged: they count more accepted than drafted tokens")
        self.accepted, self.drafted, self._long_accepted, self._long_drafted = saved.astype(np.float64)

    def limit_weight(self, max_drafted: float) -> None:
        """Replace the recent counts with long-term counts scaled to at most `max_drafted` drafted tokens.

        Used when drafting resumes after a pause, because the recent counts might no longer apply.
        """
        np.minimum(self.drafted, max_drafted, out=self.drafted)
        accepted = self._long_accepted * self.drafted
        np.divide(accepted, self._long_drafted, out=self.accepted, where=self._long_drafted > 0.0)

    def decay(self, weight: float = ACCEPTANCE_DECAY) -> None:
        """Move all counts towards their initial values. A `weight` of 0.98 removes 2 % of the difference."""
        for counts, prior in zip((self.accepted, self.drafted), self._prior, strict=True):
            counts += (prior - counts) * (1.0 - weight)
