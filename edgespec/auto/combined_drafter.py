"""Combine several drafters: their drafts are merged into one tree and verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from edgespec.auto.drafter_stats import MEASURED_ROUNDS, DrafterStats
from edgespec.auto.expected_gain import RoundEstimate
from edgespec.auto.merging import merge_trees, prune_optional, with_prefix
from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.running_stats import RunningMean
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["CombinedDrafter"]

# Prefilling draft models may use at most this share of the time that `--max-loss` allows.
_PREFILL_SHARE = 0.5
# Minimum number of tokens to prefill. A draft model that sees fewer tokens rarely predicts correctly.
_MIN_PREFILL_TOKENS = 32
# Draft lengths to compare for drafters that choose their own length.
_DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Retry unsuccessful drafters only while other drafters contribute no more accepted tokens than this.
_MAX_TOKENS_AT_RISK = 0.5
# Number of rounds for which a draft model runs instead of a better one, to measure it. A heuristic.
_CHALLENGE_ROUNDS = 4
# Minimum expected gain of a draft model that runs while a better one waits for its prefill. Lower gains are
# often caused by chance. A heuristic.
_MIN_INTERIM_GAIN = 1.15


@dataclass(frozen=True)
class _Proposal:
    tree: TokenTree
    # For each node, the probability that it is accepted, given that its parent is accepted.
    node_probs: list[float]
    # Tokens that a constraint determines. The root of the tree is the last of them, if there are any.
    forced: tuple[int, ...] = ()

    @cached_property
    def levels(self) -> tuple[list[float], list[int]]:
        reach_probs, rows = [0.0] * max(self.tree.depths), [0] * max(self.tree.depths)
        path_probs = [1.0]
        for node in range(1, self.tree.width):
            path_probs.append(path_probs[self.tree.parents[node]] * self.node_probs[node])
            level = self.tree.depths[node] - 1
            reach_probs[level] = min(reach_probs[level] + path_probs[node], 1.0)
            rows[level] += 1
        return reach_probs, rows


class CombinedDrafter(Drafter):
    """Runs each drafter whose draft is expected to save time, and merges the drafts into one tree.

    Lookup drafters run first, in every round. Of the drafters that run a model (draft models and heads), at
    most one runs in a round, because two models mostly draft the same tokens, but cost the sum of their
    times. It is the one with the highest expected gain, if its recent acceptance rate justifies its cost.
    Others are run instead for a small share of the time, to measure them and to notice when they become
    better. If a constraint determines the next tokens, a draft model drafts what follows them. Lookup tokens
    that are unlikely to be accepted are dropped. Other drafts are kept whole, because dropping tokens that
    were drawn at random would bias rejection sampling.

    Args:
        drafters: The drafters, in the order in which their drafts are merged.
        can_branch: False for a target that verifies only chains. Then only the most promising chain is
            verified.
        limits: Maximum width and number of branches of a verify pass.
        v: Function that returns the duration of a verify pass of a given width, relative to a single-token
            target pass.
        allowance_seconds: Function that returns how much time the next round can lose compared with plain
            decoding.
        exploration_seconds: Function that returns how much time a draft without an expected gain can lose.
        clock: Returns the time in seconds.

    Attributes:
        model_name: Name of the drafter that ran its model in the last call to `propose`, or None.
        drafted_levels: Depth of its draft.
        prefill_seconds: Time spent on prefill in the last call to `propose`.
        contributors: Names of the drafters that contributed tokens to the last non-empty draft.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        can_branch: bool,
        *,
        limits: PassLimits | None = None,
        v: CostFunction = assumed_cost,
        allowance_seconds: Callable[[], float] = lambda: inf,
        exploration_seconds: Callable[[], float] = lambda: inf,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self.model_name: str | None = None
        self.drafted_levels = 0
        self.prefill_seconds = 0.0
        self.contributors: tuple[str, ...] = ()
        self._stats = tuple(DrafterStats(drafter) for drafter in drafters)
        self._lookups = tuple(stats for stats in self._stats if stats.is_lookup)
        self._models = {stats.drafter.name: stats for stats in self._stats if not stats.is_lookup}
        self._can_branch = can_branch
        self._limits = limits or PassLimits()
        self._v = v
        self._allowance_seconds, self._exploration_seconds = allowance_seconds, exploration_seconds
        self._clock = clock
        self._target_step_seconds = RunningMean()
        self._proposed_at: float | None = None
        self._proposals: dict[DrafterStats, _Proposal] = {}
        self._last_token = 0
        # A drafter that runs instead of a better one, and for how many more rounds.
        self._challenger: DrafterStats | None = None
        self._challenge_rounds = 0

    @property
    def memory_use(self) -> MemoryUse:
        return sum((drafter.memory_use for drafter in self.parts), MemoryUse())

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return tuple(stats.drafter for stats in self._stats)

    @property
    def has_lookup(self) -> bool:
        return bool(self._lookups)

    @property
    def pass_seconds(self) -> dict[str, float]:
        """Duration of a single-token pass of each drafter that runs a model, by name.

        It is measured before the first draft, and is 0 if it was not measured.
        """
        return {name: stats.pass_seconds for name, stats in self._models.items()}

    def select_text_kind(self, kind: str) -> None:
        for stats in self._stats:
            stats.select_text_kind(kind)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return the statistics of all drafters as named arrays, to save for a later run."""
        saved: dict[str, NDArray[Any]] = {"plain": self._target_step_seconds.saved()}
        for stats in self._stats:
            saved |= stats.saved_statistics()
        return saved

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the arrays returned by `saved_statistics`. Damaged arrays raise KeyError or ValueError."""
        for stats in self._stats:
            stats.restore_statistics(saved)
        self._target_step_seconds.restore(saved["plain"])

    def begin(self, tokens: Sequence[int]) -> None:
        self._proposals = {}
        self._last_token = tokens[-1]
        for stats in self._stats:
            stats.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        lengths = dict.fromkeys(self._models, draft_length)
        return self.propose_within(sampler, acceptance, draft_length, lengths)

    def propose_within(
        self,
        sampler: Sampler,
        acceptance: Acceptance,
        lookup_length: int,
        model_lengths: Mapping[str, int],
    ) -> TokenTree:
        """Propose a draft of limited length.

        Args:
            sampler: See `propose`.
            acceptance: See `propose`.
            lookup_length: Maximum length of a lookup drafter's draft.
            model_lengths: Maximum length of the draft of each drafter that runs a model, by name.
        """
        self._proposals = {}
        self.prefill_seconds, self.model_name, self.drafted_levels = 0.0, None, 0
        for stats in self._lookups:
            self._ask(stats, sampler, acceptance, lookup_length)
        if chosen := self._choose_model(model_lengths):
            self.model_name = chosen.drafter.name
            length = model_lengths[self.model_name]
            tree = self._ask(chosen, sampler, acceptance, length, self._forced_before(chosen))
            self.drafted_levels = max(tree.depths)
        proposals = self._proposals
        tree = self._merged_tree() if proposals else TokenTree.chain(self._last_token)
        if tree.drafted:
            drafted = (stats for stats in self._asked if proposals[stats].tree.drafted)
            self.contributors = tuple(stats.drafter.name for stats in drafted)
        self._proposed_at = self._clock()
        return tree

    def _ask(
        self,
        stats: DrafterStats,
        sampler: Sampler,
        acceptance: Acceptance,
        length: int,
        forced: tuple[int, ...] = (),
    ) -> TokenTree:
        started = self._clock()
        tree = stats.propose(forced, sampler, acceptance, length)
        stats.record_draft(tree, length, self._clock() - started)
        self._proposals[stats] = _Proposal(tree, stats.acceptance.node_probs(tree), forced)
        return tree

    def _forced_before(self, stats: DrafterStats) -> tuple[int, ...]:
        """Return the tokens that a constraint determines, if the drafter can draft what follows them."""
        if not stats.drafts_after_forced:
            return ()
        drafts = (self._proposals[each].tree for each in self._lookups if each.drafter.name == "grammar")
        return next((draft.tokens[1:] for draft in drafts), ())

    @property
    def _asked(self) -> list[DrafterStats]:
        return [stats for stats in self._stats if stats in self._proposals]

    def _choose_model(self, lengths: Mapping[str, int]) -> DrafterStats | None:
        """Choose the drafter whose model runs in this round, and prefill it. Return None if none should."""
        levels = {stats: lengths[name] for name, stats in self._models.items() if lengths[name]}
        is_waiting = False
        for stats in self._ranked(levels):
            gain = self._expected_gain(stats, levels[stats])
            # While a better drafter waits until there is time for its prefill, run this one only if it is
            # likely to gain that time.
            if is_waiting and gain < _MIN_INTERIM_GAIN:
                return None
            is_challenger = stats is self._challenger
            if self._prefill(stats) if is_challenger else self._prepare(stats, levels[stats], gain):
                return stats
            is_waiting |= 1.0 < gain < inf and not is_challenger
        return None

    def _ranked(self, levels: Mapping[DrafterStats, int]) -> list[DrafterStats]:
        """Return drafters that run a model, the best first.

        They are compared by their long-term acceptance rates, because the recent rates of drafters that are
        not in use do not change, and would be those of lucky or unlucky drafts.
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
                    self._challenger, self._challenge_rounds = stats, _CHALLENGE_ROUNDS
                    break
        if self._challenger in gains:
            self._challenger.force_draft()
            ranked.sort(key=lambda stats: stats is not self._challenger)
        return ranked

    def _prepare(self, stats: DrafterStats, levels: int, gain: float) -> bool:
        if gain > 1.0:
            if levels > stats.empty_draft_levels:
                stats.retries.shorten()
            elif stats.retries.is_due(self._draft_cost(stats, 1) + self._v(2) - 1.0):
                stats.force_draft()
            return self._prefill(stats)
        if not self._should_retry(stats, gain):
            return False
        stats.acceptance.limit_weight()
        stats.force_draft()
        return self._prefill(stats)

    def _should_challenge(self, stats: DrafterStats, relative_gain: float) -> bool:
        """Return whether to run a drafter instead of a better one, to notice whether it has become the best.

        `relative_gain` is its expected speed divided by the best expected speed.
        """
        step, rows = self._target_step_seconds.value, round(stats.acceptance.rows.value)
        cost = max(1.0 - relative_gain, 0.0) * (self._draft_cost(stats) + self._v(1 + rows))
        cost = (
            _CHALLENGE_ROUNDS * cost + self._prefill_tokens(stats) * stats.prefill_token_seconds(step) / step
        )
        has_time = cost * step <= self._exploration_seconds()
        return stats.retries.is_affordable(cost if has_time else inf)

    def _should_retry(self, stats: DrafterStats, gain: float) -> bool:
        if sum(self._estimate().reach_probs) > _MAX_TOKENS_AT_RISK:
            return False
        chooses_length = stats.drafter.chooses_length
        levels, rows = (1, 1) if chooses_length else (None, round(stats.acceptance.rows.value))
        cost = max(1.0 - gain, 0.0) * (self._draft_cost(stats, levels) + self._v(1 + rows))
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
            return not stats.pending_tokens
        started = self._clock()
        stats.prefill(tokens)
        seconds = self._clock() - started
        self.prefill_seconds += seconds
        stats.record_prefill(tokens, seconds)
        return True

    def _prefill_tokens(self, stats: DrafterStats) -> int:
        pending, all_pending = stats.pending_tokens, stats.full_pending_tokens
        allowance = self._allowance_seconds()
        token_seconds = stats.prefill_token_seconds(self._target_step_seconds.value)
        if allowance == inf or not all_pending:
            return all_pending
        # An almost free prefill makes this infinite, so only a number of tokens is converted to an integer.
        affordable = _PREFILL_SHARE * allowance / token_seconds if token_seconds > 0.0 else 0.0
        if affordable >= all_pending:
            return all_pending
        return min(pending, int(affordable)) if affordable >= min(pending, _MIN_PREFILL_TOKENS) else 0

    @property
    def planned_prefill_seconds(self) -> dict[str, float]:
        """Time in seconds that the next call to `propose` can spend on prefilling each model, by name."""
        step = self._target_step_seconds.value
        return {
            name: self._prefill_tokens(stats) * stats.prefill_token_seconds(step)
            for name, stats in self._models.items()
        }

    def _merged_tree(self) -> TokenTree:
        chosen = self._asked if self._can_branch else self._best_chain()
        proposals = [self._proposals[stats] for stats in chosen]
        return prune_optional(
            merge_trees([with_prefix(self._last_token, each.forced, each.tree) for each in proposals]),
            [[*[1.0] * len(each.forced), *each.node_probs] for each in proposals],
            [stats.is_lookup for stats in chosen],
            self._limits,
            self._v,
            sum(self._draft_cost(stats) for stats in chosen),
        )

    def _best_chain(self) -> list[DrafterStats]:
        drafted = [stats for stats in self._asked if self._proposals[stats].tree.drafted]
        if models := [stats for stats in drafted if not stats.is_lookup]:
            return models[:1]
        return [max(drafted or self._proposals, key=lambda stats: sum(self._proposals[stats].node_probs))]

    def _is_measured(self, stats: DrafterStats) -> bool:
        return stats.is_measured and self._target_step_seconds.count >= MEASURED_ROUNDS

    def _draft_cost(self, stats: DrafterStats, levels: int | None = None) -> float:
        """Return the expected duration of a draft, relative to a single-token target pass; 0 if unknown."""
        step = self._target_step_seconds.value
        if not self._is_measured(stats) or step <= 0.0:
            return 0.0
        return stats.draft_cost(step, levels)

    def _estimate(self, without: str = "") -> RoundEstimate:
        estimate = RoundEstimate()
        for stats, proposal in self._proposals.items():
            if stats.drafter.name == without:
                continue
            estimate = estimate.with_draft(*proposal.levels, self._draft_cost(stats))
        return estimate

    def _expected_gain(self, stats: DrafterStats, draft_length: int, *, long_term: bool = False) -> float:
        """Return the expected decoding speed with a drafter divided by the speed without it.

        The result is infinite if the drafter's speed is unknown and must be measured.

        Args:
            stats: The drafter.
            draft_length: Maximum length of the draft.
            long_term: Whether to expect the long-term acceptance rates, and not those of the last drafts.
        """
        acceptance = stats.acceptance
        if not self._is_measured(stats):
            can_draft_more = 0 < stats.empty_draft_levels < draft_length
            return inf if can_draft_more or not acceptance.was_empty else 0.0
        forced = len(self._forced_before(stats))
        # The drafter's own tree also contains these tokens.
        estimate = self._estimate(without="grammar" if forced else "")
        reach_probs = acceptance.reach_probs(draft_length, long_term=long_term)
        usual = max(1, min(draft_length, round(acceptance.levels.value)))
        speed = max(
            estimate.speed_with(
                [*[1.0] * forced, *reach_probs[:levels]],
                forced + round(levels * acceptance.level_rows),
                self._draft_cost(stats, levels),
                self._v,
                self._limits.max_width,
                self._can_branch,
            )
            for levels in (_DRAFT_LENGTHS if stats.drafter.chooses_length else (usual,))
            if levels <= draft_length
        )
        return speed / self._estimate().speed(self._v)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._target_step_seconds.add((self._clock() - self._proposed_at) / self._v(tree.width))
        self._proposed_at = None
        for drafter in self.parts:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for stats, proposal in self._proposals.items():
            tree, forced = proposal.tree, proposal.forced
            if tokens[: len(forced)] != forced or len(tokens) == len(forced):
                continue
            stats.acceptance.record_outcome(tree, tokens[len(forced) :])
            if tree.drafted and len(tree.walk(tokens[len(forced) :])) > max(tree.depths):
                stats.retries.retry_next_round()
        self._proposals = {}
        if tokens:
            self._last_token = tokens[-1]
        for drafter in self.parts:
            drafter.commit(tokens)

    def note(self) -> str:
        return "; ".join(note for drafter in self.parts if (note := drafter.note()))

    def interrupt(self, enabled: bool) -> None:
        for drafter in self.parts:
            drafter.interrupt(enabled)

    def close(self) -> None:
        for drafter in self.parts:
            drafter.close()
