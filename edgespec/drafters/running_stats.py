"""Running statistics that weigh recent values most."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["AcceptanceCounts", "RunningMean"]


class RunningMean:
    """A mean that forgets: of the last ten values or so.

    value: in the unit of what was added; 0 before the first. count: how many were.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """One value more: of the first ten each weighs the same, then a new one a tenth."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, 10)

    def kept(self) -> NDArray[np.float64]:
        """All of it, for another run."""
        return np.array([self.value, self.count])

    def restore(self, kept: NDArray[np.float64]) -> None:
        """Go on from what was kept. Raises ValueError where that is no mean."""
        if kept.shape != (2,) or not np.isfinite(kept).all() or kept[1] < 0.0:
            raise ValueError(f"{kept} is no mean")
        value, count = map(float, kept)
        # What the next values say counts for more than what another run saw.
        self.value, self.count = value, min(int(count), 5)


class AcceptanceCounts:
    """How often each of several things came true lately: counts in which what is older weighs less.

    hits, tries: float64 of one shape: what it begins with, and goes back to when it is not counted.
    """

    # Half of a try's weight is gone after 34 more: enough of them for a rate, and a text may change its ways.
    REMEMBERED = 0.98
    _LONG_REMEMBERED = 0.998

    def __init__(self, hits: NDArray[np.float64], tries: NDArray[np.float64]) -> None:
        self._first = hits, tries
        self.hits, self.tries = hits.copy(), tries.copy()
        self._long_hits, self._long_tries = hits.copy(), tries.copy()

    def count(self, at: tuple[int, ...], hit: bool) -> None:
        """The one `at` was tried, and came true or not."""
        self.tries[at] = self.tries[at] * self.REMEMBERED + 1.0
        self.hits[at] = self.hits[at] * self.REMEMBERED + hit
        self._long_tries[at] = self._long_tries[at] * self._LONG_REMEMBERED + 1.0
        self._long_hits[at] = self._long_hits[at] * self._LONG_REMEMBERED + hit

    def kept(self) -> NDArray[np.float64]:
        """All of it, for another run: float64 [4, ...]."""
        return np.stack([self.hits, self.tries, self._long_hits, self._long_tries])

    def restore(self, kept: NDArray[np.float64]) -> None:
        """Go on from what was kept. Raises ValueError where those are no counts of these things."""
        if kept.shape != (4, *self.hits.shape) or not np.isfinite(kept).all() or (kept < 0.0).any():
            raise ValueError(f"{kept.shape} are no counts")
        if (kept[0] > kept[1] + 1e-6).any() or (kept[2] > kept[3] + 1e-6).any():
            raise ValueError("more came true than was tried")
        self.hits, self.tries, self._long_hits, self._long_tries = kept.astype(np.float64)

    def doubt(self, most_tries: float) -> None:
        """What was seen last may hold no more: believe the rates of a longer time, as `most_tries` would."""
        np.minimum(self.tries, most_tries, out=self.tries)
        np.divide(self._long_hits * self.tries, self._long_tries, out=self.hits, where=self._long_tries > 0.0)

    def fade(self, remembered: float = REMEMBERED) -> None:
        """Nothing was tried: go back to the beginning, by 1 - `remembered` of the way."""
        for counted, first in zip((self.hits, self.tries), self._first, strict=True):
            counted += (first - counted) * (1.0 - remembered)
