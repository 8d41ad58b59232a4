"""The bound on what speculation may cost: one account for each reply, in seconds.

Promise: a reply of N tokens takes at most ((1 + rate) N + steps) plain steps, on every path of acceptance and
cost, as long as a plain step takes what it was last measured to and no round takes more than was said to be
its worst. One that does is the last until its cost has been won back.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossLimit", "LossLimits"]

# Tries may take this share of a reply's plain time beside what it may lose in any case.
_TRYING_RATE = 0.01


@dataclass(frozen=True, slots=True)
class LossLimits:
    """What a reply may lose. rate: of its plain time. steps: plain steps beside that. Raises ValueError."""

    rate: float = 0.02
    steps: float = 2.0

    def __post_init__(self) -> None:
        if not (self.rate >= 0.0 and self.steps >= 0.0):
            raise ValueError(f"a reply cannot lose {self.rate} of its time and {self.steps} steps")


class LossLimit:
    """Counts what a reply gained by speculation less what it spent on it.

    A plain round is what plain decoding would have done: it moves nothing but the number of tokens. All that
    plain decoding would not have done is charged: rounds that drafted for what they took beyond plain steps,
    prefill of a draft, probes, and the policy's own time. Before such a round `may_lose_seconds` says what it
    may cost at worst.

    credit_seconds: gained so far, below zero when speculation has cost more than it brought.
    tokens: emitted in this reply. rounds: those of it that drafted.
    """

    def __init__(self, terms: LossLimits | None = None) -> None:
        self.terms = terms or LossLimits()
        self.credit_seconds = 0.0
        self.tokens = self.rounds = 0

    def begin(self) -> None:
        """A reply begins; what the last one gained is not this one's to lose."""
        self.credit_seconds = 0.0
        self.tokens = self.rounds = 0

    def charge(self, seconds: float) -> None:
        """Time that plain decoding would not have spent."""
        self.credit_seconds -= seconds

    def plain(self, tokens: int) -> None:
        """A plain round emitted these."""
        self.tokens += tokens

    def drafted(self, tokens: int, seconds: float, plain_seconds: float) -> None:
        """A round that drafted emitted `tokens` in `seconds`, where a plain step takes `plain_seconds`."""
        self.tokens += tokens
        self.rounds += 1
        self.credit_seconds += tokens * plain_seconds - seconds

    def may_lose_seconds(self, plain_seconds: float) -> float:
        """What may still be lost from here, with the tokens emitted so far; below zero: too much was."""
        return self.credit_seconds + (self.terms.rate * self.tokens + self.terms.steps) * plain_seconds

    def may_try_seconds(self, plain_seconds: float) -> float:
        """What of that may go into guesses that do not seem to pay, so that short replies are left alone."""
        return self.credit_seconds + (self.terms.rate + _TRYING_RATE) * self.tokens * plain_seconds

    @property
    def worst_loss(self) -> float:
        """The most that this reply may take beyond plain decoding, as a share of the latter's time."""
        return self.terms.rate + self.terms.steps / max(self.tokens, 1)
