"""The loss limit: a bound on how much speculation can slow down a reply.

`LossLimits` sets how much longer than plain decoding a reply may take, even if no drafted token is accepted.
If a draft costs more than its estimated worst case, drafting stops until the reply is within the limit again.
"""

from __future__ import annotations

from typing import NamedTuple

from edgespec.methods.auto.constants import EXPLORATION_RATE, MAX_LOSS_RATE, MAX_LOSS_STEPS

__all__ = ["LossLimits", "LossTracker"]


class LossLimits(NamedTuple):
    """The maximum slowdown of a reply, relative to plain decoding, if no draft is ever accepted.

    Attributes:
        rate: Fraction of the reply's plain decoding time, such as 0.02 for 2 %.
        steps: Additional time, as a number of single-token target passes.
    """

    rate: float = MAX_LOSS_RATE
    steps: float = MAX_LOSS_STEPS


class LossTracker:
    """Tracks how much time speculation has saved or cost in one reply, to limit the loss.

    Costs include the time spent on drafting, multi-token verify passes, draft model prefill, and deciding
    whether to draft.

    Attributes:
        credit_seconds: Time saved so far. Negative while speculation has cost more than it saved.
        tokens: Tokens emitted in this reply.
        draft_rounds: Rounds of this reply that verified a draft.
    """

    def __init__(self, limits: LossLimits | None = None) -> None:
        self.limits = limits or LossLimits()
        self.begin()

    def begin(self) -> None:
        """Reset all counts at the start of a new reply."""
        self.credit_seconds = 0.0
        self.tokens = self.draft_rounds = 0
        self._draft_round_tokens, self._draft_round_plain_seconds = 0, 0.0

    def record_target_step(self, tokens: int, draft_seconds: float = 0.0) -> None:
        """Record a target pass without drafted tokens.

        Args:
            tokens: Number of tokens emitted in the round.
            draft_seconds: Time lost trying to draft.
        """
        self.tokens += tokens
        self.credit_seconds -= draft_seconds

    def record_draft_round(self, tokens: int, seconds: float, target_step_seconds: float) -> None:
        """Record a round in which a draft was verified.

        Args:
            tokens: Number of tokens emitted in the round.
            seconds: Duration of the round.
            target_step_seconds: Duration of a single-token target pass.
        """
        self.tokens += tokens
        self.draft_rounds += 1
        self._draft_round_tokens += tokens
        self._draft_round_plain_seconds += tokens * target_step_seconds
        self.credit_seconds += tokens * target_step_seconds - seconds

    def allowance_seconds(self, target_step_seconds: float) -> float:
        """Return how many seconds the reply may lose if the next draft is rejected.

        Negative if the reply has already lost more than `limits` allows.
        """
        limit_steps = self.limits.rate * self.tokens + self.limits.steps
        return self.credit_seconds + limit_steps * target_step_seconds

    def exploration_seconds(self, target_step_seconds: float) -> float:
        """Return how many seconds may be spent on a draft without an expected gain.

        This budget grows with the reply, so short replies spend little on exploration.
        """
        limit_steps = (self.limits.rate + EXPLORATION_RATE) * self.tokens
        return self.credit_seconds + limit_steps * target_step_seconds

    def speed_up(self, target_step_seconds: float) -> float:
        """Return the speed-up over plain decoding so far, given the duration of a single-token pass."""
        other_tokens = self.tokens - self._draft_round_tokens
        plain_seconds = self._draft_round_plain_seconds + other_tokens * target_step_seconds
        seconds = plain_seconds - self.credit_seconds
        return plain_seconds / seconds if seconds > 0.0 else 1.0

    @property
    def max_loss(self) -> float:
        """Maximum extra time of this reply, as a fraction of its plain decoding time."""
        return self.limits.rate + self.limits.steps / max(self.tokens, 1)
