"""Pause drafting while it costs more time than it saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from edgespec.methods.auto.constants import (
    MAX_PAUSE_ROUNDS,
    MIN_GAIN,
    MIN_PAUSE_ROUNDS,
    NEGLIGIBLE_COST,
    RETRY_COST_FACTOR,
    RETRY_ROUNDS,
    TRIAL_ROUNDS,
)
from edgespec.methods.auto.retry_schedule import RetrySchedule
from edgespec.methods.running_stats import RunningMean

__all__ = ["Backoff"]


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
        """Return whether to draft now. While paused, drafting is retried only occasionally."""
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
        """Return the state of the backoff as named arrays, to save for a later run."""
        return {f"patience.{name}": part.saved() for name, part in self._parts.items()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the arrays returned by `saved_statistics`."""
        for name, part in self._parts.items():
            part.restore(saved[f"patience.{name}"])
        self._trial_rounds = 0

    @property
    def _parts(self) -> dict[str, RunningMean | RetrySchedule]:
        return {"gain": self._gain, "silence": self._empty_cost, "rest": self._retries}
