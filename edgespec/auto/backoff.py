"""Whether asking for guesses is worth its time: given up for a while where it brings less than it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from edgespec.auto.retry_schedule import RetrySchedule
from edgespec.drafters.running_stats import RunningMean

__all__ = ["Backoff"]

# Asking that loses more than this share of a plain step, round for round, is given up for a while.
_WORTH_ASKING = -0.01
# Asking that finds nothing and takes less than this share of a plain step is as good as free.
_FREE_ASKING = 0.005
# So many rounds are asked in before that is judged, and when it is tried again.
_JUDGED_ROUNDS = 8
_AWAKE_ROUNDS = 4
_FIRST_REST, _LONGEST_REST = 32, 512
# So many times more rarely than other tries: a target that is done before a guess is made seldom changes.
_RARELY = 3


class Backoff:
    """Counts what rounds with guesses gained, in plain steps, and when there is enough of asking.

    gain: of such a round, lately. On a small target looking for guesses may take longer than they save.
    """

    def __init__(self) -> None:
        self._gain, self._silence = RunningMean(), RunningMean()
        self._rest = RetrySchedule(_FIRST_REST, _LONGEST_REST)
        self._awake_rounds = _JUDGED_ROUNDS

    @property
    def gain(self) -> float:
        """What a round in which it was asked gained lately, in plain steps."""
        return self._gain.value

    @property
    def over(self) -> bool:
        """Is asking given up, until it is tried again?"""
        return self._awake_rounds <= 0 and self._dear

    @property
    def _dear(self) -> bool:
        """Has asking brought less than it takes, and does it take anything?"""
        return self._gain.value < _WORTH_ASKING and self._silence.value > _FREE_ASKING

    def asks(self) -> bool:
        """Is this one of the rounds to ask in?"""
        if not self.over:
            return True
        if not self._rest.due(_RARELY * _AWAKE_ROUNDS * self._silence.value):
            return False
        # Judged by what it brings now, not by what it once did not.
        self._awake_rounds, self._gain = _AWAKE_ROUNDS, RunningMean()
        return True

    def pass_by(self, rounds: int) -> None:
        """So many rounds went by in which it was not asked."""
        self._rest.wait(rounds)

    def silent(self, cost: float) -> None:
        """It was asked, which took so many plain steps, and there was no guess."""
        self._silence.add(cost)
        self._judge(-cost)

    def looked(self, cost: float) -> None:
        """Nothing was asked, for the ledger could not bear it; to find that out took so many plain steps."""
        if cost > _FREE_ASKING:
            self.silent(cost)

    def guessed(self, gain: float) -> None:
        """It was asked, and the round gained so many plain steps."""
        self._judge(gain)

    def _judge(self, gain: float) -> None:
        self._gain.add(gain)
        self._awake_rounds -= 1
        if not self._dear:
            self._rest.paid()

    def kept(self) -> dict[str, NDArray[Any]]:
        """All of it by name, for another run."""
        return {f"patience.{name}": one.kept() for name, one in self._parts.items()}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what was kept. Raises KeyError, ValueError."""
        for name, one in self._parts.items():
            one.restore(kept[f"patience.{name}"])
        self._awake_rounds = 0

    @property
    def _parts(self) -> dict[str, RunningMean | RetrySchedule]:
        return {"gain": self._gain, "silence": self._silence, "rest": self._rest}
