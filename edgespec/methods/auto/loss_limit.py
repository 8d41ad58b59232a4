"""The loss limit: a bound on how much speculation can slow down a reply.

`LossLimits` sets how much longer than plain decoding a reply may take, even if no drafted token is accepted.
If a draft costs more than its estimated worst case, drafting stops until the reply is within the limit again.
"""

from __future__ import annotations

from typing import NamedTuple

from edgespec.methods.auto.constants import (
    ASSUMED_LEVEL_COST,
    DRAFT_ROUND_DECAY,
    EXPLORATION_RATE,
    FIRST_ROUNDS,
    FIRST_ROUNDS_SHARE,
    MAX_LEVEL_COST_RATIO,
    MAX_LEVEL_PASSES,
    MAX_LOSS_RATE,
    MAX_LOSS_STEPS,
    WORST_DRAFT_STEP_DECAY,
)
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.running_stats import RunningMean

__all__ = ["LossLimits", "LossTracker", "WorstCaseCosts"]


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

        The result is negative if the reply has already lost more than `limits` allows.
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


class WorstCaseCosts:
    """Estimates how much time is lost in the worst case if all tokens of a draft are rejected.

    Args:
        costs: Live costs of the target's passes.
        pass_seconds: Duration of a pass of the draft model, or 0 if unknown.

    Attributes:
        level_seconds: Worst-case time to draft one level of a token tree.
    """

    def __init__(self, costs: LiveCosts, pass_seconds: float = 0.0) -> None:
        self._assumed_level_cost = ASSUMED_LEVEL_COST
        if pass_seconds:
            self._assumed_level_cost = MAX_LEVEL_PASSES * pass_seconds / costs.target_step_seconds
        self.level_seconds = self._assumed_level_cost * costs.target_step_seconds
        self._costs = costs
        self._mean_level_seconds = RunningMean()

    def change_conditions(self, previous_step_seconds: float) -> None:
        """Adapt to a new number of concurrent replies or CPU threads.

        Call `LiveCosts.set_conditions` first.
        """
        self.level_seconds *= self._costs.target_step_seconds / previous_step_seconds

    def extra_pass_seconds(self, width: int) -> float:
        """Return how much longer a `width`-token pass takes than a single-token pass in the worst case.

        This includes the time to switch back to single-token passes afterwards.
        """
        costs = self._costs
        extra_steps = max(costs.worst_v(width) - 1.0, 0.0)
        return extra_steps * costs.target_step_seconds + costs.curve.change_seconds

    def loss_seconds(self, levels: int, level_seconds: float) -> float:
        """Return the worst-case time lost if `levels` tokens are drafted and all of them are rejected.

        `level_seconds` is the time to draft one token.
        """
        return levels * level_seconds + self.extra_pass_seconds(levels + 1)

    def affordable_length(self, draft_length: int, allowance_seconds: float, level_seconds: float) -> int:
        """Return the largest draft length that costs at most `allowance_seconds` if the draft is rejected."""
        if level_seconds > 0.0:
            # Skip lengths whose drafting time alone exceeds the allowance. On small targets, checking every
            # length would cost more time than a round adds to the allowance, so the allowance would never
            # recover once spent.
            draft_length = int(max(min(draft_length, allowance_seconds / level_seconds), 0.0))
        for levels in range(draft_length, 0, -1):
            if self.loss_seconds(levels, level_seconds) <= allowance_seconds:
                return levels
        return 0

    def model_draft_length(self, draft_length: int, allowance_seconds: float, draft_rounds: int) -> int:
        """Return how many tokens a draft model may draft without risking more than `allowance_seconds`.

        The first two drafts of a reply usually get only half of the allowance, so that drafting can continue
        if one of them is rejected.
        """
        level = self.level_seconds
        longest = self.affordable_length(draft_length, allowance_seconds, level)
        if longest and draft_rounds < FIRST_ROUNDS:
            shorter = self.affordable_length(longest, FIRST_ROUNDS_SHARE * allowance_seconds, level)
            longest_loss = self.loss_seconds(longest, level)
            if shorter and (
                self.loss_seconds(shorter, level) * longest <= MAX_LEVEL_COST_RATIO * longest_loss * shorter
            ):
                return shorter
        return longest

    def record_target_step(self) -> None:
        """Slightly decay the worst-case time to draft a token, so that outliers are forgotten."""
        self._set_level_seconds(self.level_seconds * WORST_DRAFT_STEP_DECAY)

    def record_draft(self, levels: int, seconds: float) -> None:
        """Record how long drafting took. `levels` is 0 if nothing was drafted."""
        level_seconds = seconds / max(1, levels)
        if levels:
            self._mean_level_seconds.add(level_seconds)
        self._set_level_seconds(max(self.level_seconds * DRAFT_ROUND_DECAY, level_seconds))

    def _set_level_seconds(self, worst_seconds: float) -> None:
        mean = self._mean_level_seconds
        usual = mean.value if mean.count else self._assumed_level_cost * self._costs.target_step_seconds
        self.level_seconds = max(worst_seconds, usual)
