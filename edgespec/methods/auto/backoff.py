"""Pause drafting while it costs more time than it saves, and schedule when to retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.auto.constants import (
    MAX_PAUSE_ROUNDS,
    MAX_RETRY_INTERVAL,
    MIN_GAIN,
    MIN_PAUSE_ROUNDS,
    MIN_RETRY_INTERVAL,
    NEGLIGIBLE_COST,
    RARE_FACTOR,
    RETRY_COST_FACTOR,
    RETRY_ROUNDS,
    RETRY_SHARE,
    TRIAL_ROUNDS,
)
from edgespec.methods.running_stats import RunningMean

__all__ = ["Backoff", "RetrySchedule"]


class Backoff:
    """Pauses drafting while it costs more time than it saves, and retries at increasing intervals.

    On a small target, just searching for drafts can cost more time than the accepted tokens save.
    """

    def __init__(self) -> None:
        self._gain, self._empty_cost = RunningMean(), RunningMean()
        self._retries = RetrySchedule(MIN_PAUSE_ROUNDS, MAX_PAUSE_ROUNDS)
        self._trial_rounds = TRIAL_ROUNDS

    @property
    def gain(self) -> float:
        """Mean time saved by recent drafts, relative to a single-token target pass."""
        return self._gain.value

    @property
    def is_paused(self) -> bool:
        """Whether drafting is paused until the next retry."""
        return self._trial_rounds <= 0 and self._is_losing

    @property
    def _is_losing(self) -> bool:
        return self._gain.value < MIN_GAIN and self._empty_cost.value > NEGLIGIBLE_COST

    def may_draft(self) -> bool:
        """Return whether to draft now. During a pause, this is True only for occasional retries."""
        if not self.is_paused:
            return True
        if not self._retries.is_due(RETRY_COST_FACTOR * RETRY_ROUNDS * self._empty_cost.value):
            return False
        self._trial_rounds, self._gain = RETRY_ROUNDS, RunningMean()
        return True

    def skip_rounds(self, rounds: int) -> None:
        self._retries.skip_rounds(rounds)

    def record_empty_draft(self, cost: float) -> None:
        """Record a round in which the drafters proposed nothing.

        Args:
            cost: Time spent searching for a draft, relative to a single-token target pass.
        """
        self._empty_cost.add(cost)
        self.record_draft(-cost)

    def record_unaffordable_draft(self, cost: float) -> None:
        """Record a round in which drafting would have exceeded `--max-loss`.

        Args:
            cost: Time spent deciding whether to draft, relative to a single-token target pass.
        """
        if cost > NEGLIGIBLE_COST:
            self.record_empty_draft(cost)

    def record_draft(self, gain: float) -> None:
        """Record a round in which a draft was verified.

        Args:
            gain: Time saved over plain decoding, relative to a single-token target pass.
        """
        self._gain.add(gain)
        self._trial_rounds -= 1
        if not self._is_losing:
            self._retries.shorten()

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return the backoff state as named arrays, to be saved for later runs.

        The names start with `patience`, so that files written by earlier versions remain readable.
        """
        return {f"patience.{name}": part.saved() for name, part in self._parts.items()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state returned by `saved_statistics`."""
        for name, part in self._parts.items():
            part.restore(saved[f"patience.{name}"])
        self._trial_rounds = 0

    @property
    def _parts(self) -> dict[str, RunningMean | RetrySchedule]:
        return {"gain": self._gain, "silence": self._empty_cost, "rest": self._retries}


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
        """Whether retries are rare, because several in a row saved no time."""
        return self._interval >= RARE_FACTOR * self._min_interval

    def is_due(self, cost: float) -> bool:
        """Count a round, and return whether to retry the drafter in that round.

        Args:
            cost: Expected duration of a retry, relative to a single-token target pass.
        """
        self._waited += 1
        if self._waited < min(self._interval, max(self._min_interval, cost / RETRY_SHARE)):
            return False
        self._interval, self._waited = min(2 * self._interval, self._max_interval), 0
        return True

    def is_affordable(self, cost: float) -> bool:
        """Count a round, and return whether to run this drafter in place of a better one.

        Unlike `is_due`, this returns False until `cost` is at most 0.75 % of the decoding time, however long
        that takes. A draft model that must first prefill a long prompt may therefore never be tried during a
        reply.
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
        """Restore the retry interval returned by `saved`. Raises ValueError if it is invalid."""
        if saved.shape != (1,) or not self._min_interval <= saved[0] <= self._max_interval:
            limits = f"{self._min_interval} to {self._max_interval}"
            raise ValueError(
                f"the saved statistics are damaged: the interval for retrying a drafter is {saved}, but must"
                f" be {limits}"
            )
        self._interval, self._waited = int(saved[0]), 0
