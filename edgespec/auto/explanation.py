"""Why a reply is made as it is, in words for the person who waits for it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DraftingStatus"]

# A target whose plain step takes less is done before a guess is made.
_FAST_SECONDS = 0.003
_MEASURES = "what a plain step takes is measured first"


@dataclass(frozen=True, slots=True)
class DraftingStatus:
    """How guessing stands in a reply. Costs are in plain steps.

    name: of the drafters. drafts: they go on guessing. gains: the reply is faster by them so far. tokens:
    emitted. guessed: rounds that verified a guess were among those `asked`; held_back: rounds that did not
    ask, because a guess may cost `guess_steps` and the reply lose no more than `may_lose_steps`.
    round_steps: what a round that asks has gained lately. plain_seconds: of a plain step. replies: that are
    made at once.
    """

    name: str
    drafts: bool
    gains: bool
    tokens: int
    guessed: bool
    asked: int
    held_back: int
    guess_steps: float
    may_lose_steps: float
    round_steps: float
    plain_seconds: float
    replies: int = 1

    @property
    def reason(self) -> str:
        """One clause."""
        among = f", among {self.replies} replies at once" if self.replies > 1 else ""
        return self._alone + among

    @property
    def _alone(self) -> str:
        if self.drafts and self.guessed and self.gains:
            return "guesses pay here"
        if not self.tokens:
            return _MEASURES
        if self.plain_seconds < _FAST_SECONDS and not self.gains:
            each = f"{1000 * self.plain_seconds:.2g} ms a token"
            return f"this target is so small ({each}) that guessing costs more than it brings"
        if self.held_back and self.guess_steps > self.may_lose_steps:
            return self._held_back()
        if self.drafts and self.guessed:
            return "guesses are being tried, and have not paid so far"
        if self.guessed:
            no = "no longer" if self.gains else "do not"
            return f"guesses {no} pay: a round with one lost {_steps(-self.round_steps)}"
        if self.asked:
            return f"{self.name} had no guess that was likely to pay, {_times(self.asked)} it was asked"
        if self.round_steps >= 0.0:
            return _MEASURES
        return f"guesses have not paid lately; {self.name} is tried again now and then"

    def _held_back(self) -> str:
        if self.may_lose_steps <= 0.0:
            return "what guessing may cost this reply (--max-loss) is used up"
        most = f"{self.may_lose_steps:.1f}"
        return f"a wrong guess may cost {_steps(self.guess_steps)}, and this reply may lose {most} by now"


def _steps(number: float) -> str:
    return f"{max(number, 0.0):.0%} of a plain step" if number < 0.995 else f"{number:.1f} plain steps"


def _times(number: int) -> str:
    return "the one time" if number == 1 else f"the {number} times"
