"""Choose which of several draft models and heads drafts in each round.

The choice depends on the estimated decoding speed with and without each one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest
from math import inf

from edgespec.methods.auto.constants import (
    CHALLENGE_ROUNDS,
    COMPARED_DRAFT_LENGTHS,
    MAX_TOKENS_AT_RISK,
    MEASURED_ROUNDS,
    MIN_INTERIM_GAIN,
    MIN_PREFILL_TOKENS,
    PREFILL_SHARE,
)
from edgespec.methods.auto.drafter_stats import DrafterStats
from edgespec.methods.costs.curve import CostFunction, PassLimits
from edgespec.methods.running_stats import RunningMean

__all__ = ["ModelSelector", "RoundEstimate"]


class ModelSelector:
    """Chooses one of the drafters that run a model for each round, and prefills its model.

    At most one drafter runs per round, because two models would mostly draft the same tokens at twice the
    cost. The drafter with the highest expected gain runs if its recent acceptance rate justifies its cost.
    Occasionally, another drafter runs instead, to detect whether it has become better.

    Args:
        models: The drafters that run a model, by name.
        target_step_seconds: Mean duration of a single-token target pass. Updated by the caller.
        limits: Maximum width and number of branches of a verify pass.
        v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        allowance_seconds: Returns how much time the next round may lose compared with plain decoding.
        exploration_seconds: Returns how much time may be lost to a draft that is not expected to save time.
        clock: Returns the time in seconds.

    Attributes:
        prefill_seconds: Time spent on prefill in the last call to `choose`.
    """

    def __init__(
        self,
        models: Mapping[str, DrafterStats],
        target_step_seconds: RunningMean,
        limits: PassLimits,
        v: CostFunction,
        allowance_seconds: Callable[[], float],
        exploration_seconds: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.prefill_seconds = 0.0
        self._models = models
        self._target_step_seconds = target_step_seconds
        self._limits, self._v = limits, v
        self._allowance_seconds, self._exploration_seconds = allowance_seconds, exploration_seconds
        self._clock = clock
        self._estimate = self._other_estimate = RoundEstimate()
        # The drafter to try instead of the best one, if any, and for how many more rounds.
        self._challenger: DrafterStats | None = None
        self._challenge_rounds = 0

    def choose(
        self,
        lengths: Mapping[str, int],
        estimate: RoundEstimate,
        other_estimate: RoundEstimate,
    ) -> DrafterStats | None:
        """Choose the drafter to run in this round, and prefill it. Return None if no drafter should run.

        Args:
            lengths: Maximum draft length of each drafter, by name. 0 excludes a drafter.
            estimate: Estimate of the lookup drafters' drafts in this round.
            other_estimate: The same estimate without `grammar`'s draft. Used for drafters with
                `drafts_forced`, whose drafts include and continue the tokens that `grammar` drafts.
        """
        self.prefill_seconds, self._estimate = 0.0, estimate
        self._other_estimate = other_estimate
        levels = {stats: lengths[name] for name, stats in self._models.items() if lengths[name]}
        is_waiting = False
        for stats in self._ranked(levels):
            gain = self._expected_gain(stats, levels[stats])
            # A better drafter is waiting until the loss limit allows its prefill. In the meantime, run this
            # drafter only if it is likely to save enough time to make up for that prefill.
            if is_waiting and gain < MIN_INTERIM_GAIN:
                return None
            is_challenger = stats is self._challenger
            if self._prefill(stats) if is_challenger else self._prepare(stats, levels[stats], gain):
                return stats
            is_waiting |= 1.0 < gain < inf and not is_challenger
        return None

    def _ranked(self, levels: Mapping[DrafterStats, int]) -> list[DrafterStats]:
        """Sort drafters by expected gain, best first. A drafter that is being measured comes first.

        Gains are computed from long-term acceptance rates. An unused drafter's recent rates never change, so
        a few unusual drafts would distort its rank for a long time.
        """
        if len(levels) < 2:
            return list(levels)
        gains = {stats: self._expected_gain(stats, levels[stats], long_term=True) for stats in levels}
        ranked = sorted(gains, key=gains.__getitem__, reverse=True)
        best_gain = gains[ranked[0]]
        self._challenge_rounds = max(self._challenge_rounds - 1, 0)
        if not self._challenge_rounds:
            self._challenger = None
            for stats in ranked[1:] if 1.0 < best_gain < inf else ():
                if self._should_challenge(stats, gains[stats] / best_gain):
                    self._challenger, self._challenge_rounds = stats, CHALLENGE_ROUNDS
                    break
        if self._challenger in gains:
            self._challenger.drafter.force_draft()
            ranked.sort(key=lambda stats: stats is not self._challenger)
        return ranked

    def _prepare(self, stats: DrafterStats, levels: int, gain: float) -> bool:
        if gain > 1.0:
            if levels > stats.empty_draft_levels:
                stats.retries.shorten()
            elif stats.retries.is_due(self.draft_cost(stats, 1) + self._v(2) - 1.0):
                stats.drafter.force_draft()
            return self._prefill(stats)
        if not self._should_retry(stats, gain):
            return False
        stats.acceptance.limit_weight()
        stats.drafter.force_draft()
        return self._prefill(stats)

    def _should_challenge(self, stats: DrafterStats, relative_gain: float) -> bool:
        """Return whether to run this drafter instead of the best one, to check whether it has become better.

        `relative_gain` is the drafter's expected speed divided by the best expected speed.
        """
        step, rows = self._target_step_seconds.value, round(stats.acceptance.rows.value)
        cost = max(1.0 - relative_gain, 0.0) * (self.draft_cost(stats) + self._v(1 + rows))
        cost = (
            CHALLENGE_ROUNDS * cost + self._prefill_tokens(stats) * stats.prefill_token_seconds(step) / step
        )
        has_time = cost * step <= self._exploration_seconds()
        return stats.retries.is_affordable(cost if has_time else inf)

    def _should_retry(self, stats: DrafterStats, gain: float) -> bool:
        if sum(self._estimate.reach_probs) > MAX_TOKENS_AT_RISK:
            return False
        chooses_length = stats.drafter.chooses_length
        levels, rows = (1, 1) if chooses_length else (None, round(stats.acceptance.rows.value))
        cost = max(1.0 - gain, 0.0) * (self.draft_cost(stats, levels) + self._v(1 + rows))
        cost += self._first_prefill_cost(stats)
        seconds = cost * self._target_step_seconds.value
        if stats.retries.is_rare and seconds > self._exploration_seconds():
            return False
        return stats.retries.is_due(cost)

    def _first_prefill_cost(self, stats: DrafterStats) -> float:
        step = self._target_step_seconds.value
        if stats.has_prefilled or step <= 0.0:
            return 0.0
        return self._prefill_tokens(stats) * stats.prefill_token_seconds(step) / step

    def _prefill(self, stats: DrafterStats) -> bool:
        tokens = self._prefill_tokens(stats)
        if not tokens:
            return not stats.drafter.pending_tokens
        started = self._clock()
        stats.drafter.prefill(tokens)
        seconds = self._clock() - started
        self.prefill_seconds += seconds
        stats.record_prefill(tokens, seconds)
        return True

    def _prefill_tokens(self, stats: DrafterStats) -> int:
        pending, all_pending = stats.drafter.pending_tokens, stats.drafter.full_pending_tokens
        allowance = self._allowance_seconds()
        token_seconds = stats.prefill_token_seconds(self._target_step_seconds.value)
        if allowance == inf or not all_pending:
            return all_pending
        # The quotient is infinite if a prefill costs almost nothing, so compare it before converting it to an
        # integer.
        affordable = PREFILL_SHARE * allowance / token_seconds if token_seconds > 0.0 else 0.0
        if affordable >= all_pending:
            return all_pending
        return min(pending, int(affordable)) if affordable >= min(pending, MIN_PREFILL_TOKENS) else 0

    @property
    def planned_prefill_seconds(self) -> dict[str, float]:
        """Maximum prefill time of each model in the next call to `choose`, in seconds, keyed by name."""
        step = self._target_step_seconds.value
        return {
            name: self._prefill_tokens(stats) * stats.prefill_token_seconds(step)
            for name, stats in self._models.items()
        }

    def _is_measured(self, stats: DrafterStats) -> bool:
        return stats.is_measured and self._target_step_seconds.count >= MEASURED_ROUNDS

    def draft_cost(self, stats: DrafterStats, levels: int | None = None) -> float:
        """Return the expected draft duration relative to a single-token target pass, or 0 if unknown."""
        step = self._target_step_seconds.value
        if not self._is_measured(stats) or step <= 0.0:
            return 0.0
        return stats.draft_cost(step, levels)

    def _expected_gain(self, stats: DrafterStats, draft_length: int, *, long_term: bool = False) -> float:
        """Return the ratio of the expected decoding speeds with and without a drafter.

        The result is infinite if the drafter's speed is unknown and must be measured.

        Args:
            stats: The drafter to evaluate.
            draft_length: Maximum length of the draft.
            long_term: Whether to use long-term acceptance rates instead of recent ones.
        """
        acceptance = stats.acceptance
        if not self._is_measured(stats):
            can_draft_more = 0 < stats.empty_draft_levels < draft_length
            return inf if can_draft_more or not acceptance.was_empty else 0.0
        estimate = self._other_estimate if stats.drafter.drafts_forced else self._estimate
        speed = self._speed_with(stats, draft_length, estimate, long_term=long_term)
        return speed / estimate.speed(self._v)

    def expected_speed_up(self, stats: DrafterStats) -> float | None:
        """Return the expected speed with this drafter alone, relative to plain decoding.

        Returns None if the drafter's speed has not been measured yet.
        """
        if not self._is_measured(stats):
            return None
        return self._speed_with(stats, COMPARED_DRAFT_LENGTHS[-1], RoundEstimate(), long_term=False)

    def _speed_with(
        self, stats: DrafterStats, draft_length: int, estimate: RoundEstimate, *, long_term: bool
    ) -> float:
        """Return the expected speed relative to plain decoding if a drafter adds to the drafts of others.

        Args:
            stats: The drafter.
            draft_length: Maximum length of the draft.
            estimate: Estimate of the drafts of the others.
            long_term: Whether to use long-term acceptance rates instead of recent ones.
        """
        acceptance = stats.acceptance
        reach_probs = acceptance.reach_probs(draft_length, long_term=long_term)
        usual = max(1, min(draft_length, round(acceptance.levels.value)))
        return max(
            estimate.speed_with(
                reach_probs[:levels],
                round(levels * acceptance.level_rows),
                self.draft_cost(stats, levels),
                self._v,
                self._limits,
            )
            for levels in (COMPARED_DRAFT_LENGTHS if stats.drafter.chooses_length else (usual,))
            if levels <= draft_length
        )


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """Estimate for the combined draft of all drafters selected so far in this round.

    Attributes:
        reach_probs: For each level of the draft, the probability that one of its tokens is accepted.
        rows: Number of drafted tokens on each level.
        cost: Duration of drafting, relative to a single-token target pass.
    """

    reach_probs: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    cost: float = 0.0

    def with_draft(self, reach_probs: Sequence[float], rows: Sequence[int], cost: float) -> RoundEstimate:
        all_rows = tuple(sum(pair) for pair in zip_longest(self.rows, rows, fillvalue=0))
        return RoundEstimate(tuple(_either_prob(self.reach_probs, reach_probs)), all_rows, self.cost + cost)

    def speed(self, v: CostFunction) -> float:
        """Return the expected speed-up over plain decoding if the draft's best prefix is verified.

        Args:
            v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        """
        tokens = accumulate(self.reach_probs, initial=1.0)
        widths = accumulate(self.rows, initial=1)
        return max(expected / (self.cost + v(width)) for expected, width in zip(tokens, widths, strict=True))

    def speed_with(
        self,
        reach_probs: Sequence[float],
        rows: int,
        cost: float,
        v: CostFunction,
        limits: PassLimits,
    ) -> float:
        """Return the expected speed-up over plain decoding with a new draft added to the current one.

        All tokens of the new draft are verified. The current draft is shortened if that saves time.

        Args:
            reach_probs: For each level of the new draft, the probability that one of its tokens is accepted.
            rows: Number of tokens in the new draft.
            cost: Time to create the new draft, relative to a single-token target pass.
            v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
            limits: Limits of a verify pass. Without branches, only the new draft is verified.
        """
        alone = chain(reach_probs, repeat(0.0))
        either = _either_prob(self.reach_probs, reach_probs)
        added = (both - one for both, one in zip(either, alone, strict=False))
        tokens = accumulate(added, initial=1.0 + sum(reach_probs))
        widths = list(accumulate(self.rows, initial=1))
        return max(
            expected / (self.cost + cost + v(min(width + rows, limits.max_width)))
            for expected, width in zip(tokens, widths if limits.can_branch else widths[:1], strict=False)
        )


def _either_prob(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return, for each depth, the probability that at least one of two drafts is accepted.

    The result is halfway between the probabilities for independent and for identical drafts.
    """
    probs = []
    for one, other in zip_longest(first, second, fillvalue=0.0):
        low, high = sorted((one, other))
        probs.append(high + 0.5 * low * (1.0 - high))
    return probs
