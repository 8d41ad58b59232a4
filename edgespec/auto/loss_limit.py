"""The loss limit: a bound on how much slower speculation may make a reply.

A reply of N tokens takes at most (1 + rate) * N + steps target steps, whatever is accepted. The bound holds
as long as a target step takes its measured time and no round costs more than its estimated worst case. A
round that does is the last one with a draft until its cost is regained.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossLimit", "LossLimits"]

# Share of a reply's plain decoding time that exploratory drafts may cost, in addition to the rate.
_EXPLORATION_RATE = 0.01


@dataclass(frozen=True, slots=True)
class LossLimits:
    """How much time speculation may cost a reply.

    Attributes:
        rate: Share of the reply's plain decoding time, 0.02 for 2 %.
        steps: Target steps in addition to that share.

    Raises:
        ValueError: A limit is negative or not a number.
    """

    rate: float = 0.02
    steps: float = 2.0

    def __post_init__(self) -> None:
        if not (self.rate >= 0.0 and self.steps >= 0.0):
            raise ValueError(f"loss limits must not be negative: rate {self.rate}, steps {self.steps}")


class LossLimit:
    """The credit of one reply: the time that speculation has saved minus the time it has cost.

    Rounds without a draft only count tokens, because plain decoding would have done the same. Everything
    else is charged: drafting, wider verify passes, prefill of a draft model, and the controller itself.

    Attributes:
        limits: The agreed limits.
        credit_seconds: Time saved so far; negative while speculation has cost more than it saved.
        tokens: Tokens emitted in this reply.
        draft_rounds: Rounds of this reply that verified a draft.
    """

    def __init__(self, limits: LossLimits | None = None) -> None:
        self.limits = limits or LossLimits()
        self.credit_seconds = 0.0
        self.tokens = self.draft_rounds = 0

    def begin(self) -> None:
        """Start a reply without credit from earlier ones."""
        self.credit_seconds = 0.0
        self.tokens = self.draft_rounds = 0

    def charge(self, seconds: float) -> None:
        """Charge time that plain decoding would not have spent."""
        self.credit_seconds -= seconds

    def record_target_step(self, tokens: int) -> None:
        """Record a round without a draft."""
        self.tokens += tokens

    def record_draft_round(self, tokens: int, seconds: float, target_step_seconds: float) -> None:
        """Record a round that verified a draft.

        Args:
            tokens: Tokens that the round emitted.
            seconds: Duration of the round.
            target_step_seconds: Duration of one target step now.
        """
        self.tokens += tokens
        self.draft_rounds += 1
        self.credit_seconds += tokens * target_step_seconds - seconds

    def allowance_seconds(self, target_step_seconds: float) -> float:
        """Return how much the next round may lose; negative once the limit is exceeded."""
        return (
            self.credit_seconds + (self.limits.rate * self.tokens + self.limits.steps) * target_step_seconds
        )

    def exploration_seconds(self, target_step_seconds: float) -> float:
        """Return the exploration budget: how much a draft without an expected gain may lose.

        It grows with the reply, so that short replies spend nothing on exploration.
        """
        return (
            self.credit_seconds + (self.limits.rate + _EXPLORATION_RATE) * self.tokens * target_step_seconds
        )

    @property
    def max_loss(self) -> float:
        """Maximum extra time of this reply, as a fraction of its plain decoding time."""
        return self.limits.rate + self.limits.steps / max(self.tokens, 1)
