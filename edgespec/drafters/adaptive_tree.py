"""Tree growth that adapts the shape of a draft to its probabilities and to the cost of verifying it.

Sources: EAGLE-2 (arXiv 2406.16858) expands the nodes of largest path probability first. Sequoia (arXiv
2402.12374) sizes a tree by the measured cost of a pass of its width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.running_stats import AcceptanceCounts, RunningMean
from edgespec.drafters.tree_growth import Children, DraftProbs, TreeGrowth

__all__ = ["AdaptiveTreeGrowth"]

# Levels below the current one that are estimated for trees. Estimates further ahead are too uncertain.
_MAX_LOOKAHEAD_LEVELS = 4
# Width limit of a draft.
_MAX_WIDTH = 64
# Cost of width 2 from which a forced draft has two levels: one level would hardly be cheaper.
_STEEP_COST = 1.9
# Assumed cost of a draft pass, in target steps, until it is measured.
_ASSUMED_DRAFT_PASS_COST = 0.2


class AdaptiveTreeGrowth(TreeGrowth):
    """Adds the children, level by level, that maximise the expected speed of the round.

    The speed is S = (1 + sum of path probabilities) / (draft passes * c + v(width)), in tokens per target
    step. Each level weighs its possible children together with their expected descendants. The cost c of a
    draft pass is measured, and v need not be monotone.

    Args:
        limits: Width and branches of a verify pass.
        v: Cost of a verify pass by width, in target steps. It is read anew in each round.
        siblings: Children per node at most; 1 grows chains.
        clock: Returns the time in seconds.
    """

    chooses_length = True

    def __init__(
        self,
        limits: PassLimits | None = None,
        v: CostFunction = assumed_cost,
        siblings: int = 4,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        limits = limits or PassLimits()
        self.siblings = siblings if limits.max_branches > 1 else 1
        self._max_width = min(limits.max_width, _MAX_WIDTH)
        self._max_branches = limits.max_branches
        self._v = v
        self._acceptance = _ChildAcceptance(self.siblings)
        self._clock = clock
        self._draft_pass_seconds, self._target_step_seconds = RunningMean(), RunningMean()
        self._is_forced = False
        self._round = _Round(0, 0.0, np.ones(1), 0.0)

    @property
    def draft_pass_cost(self) -> float:
        """Cost of a pass of the draft model, in target steps."""
        if not self._draft_pass_seconds.value or not self._target_step_seconds.value:
            return _ASSUMED_DRAFT_PASS_COST
        return self._draft_pass_seconds.value / self._target_step_seconds.value

    def begin_round(self, draft_length: int) -> bool:
        costs = np.array([self._v(width) for width in range(1, self._max_width + 1)])
        self._round = _Round(
            draft_length, self.draft_pass_cost, costs, self._clock(), is_forced=self._is_forced
        )
        self._is_forced = False
        levels, _, _ = self._best_addition(np.ones(1), width=0, expected_tokens=0.0)
        return levels > 0 or self._round.is_forced

    def force_draft(self) -> None:
        self._is_forced = True
        self._acceptance.limit_weight()

    def finish_draft(self) -> None:
        now = self._clock()
        if self._round.passes:
            self._draft_pass_seconds.add((now - self._round.started) / self._round.passes)
        self._round.started = now

    def record_verify_pass(self, width: int) -> None:
        if self._round.passes:
            self._target_step_seconds.add((self._clock() - self._round.started) / self._v(width))
            self._round.passes = 0  # The next pass may verify no draft of this drafter.

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        this_round = self._round
        this_round.passes += 1
        if this_round.is_forced:
            return [
                self._forced_child(path_prob, draft_probs(node)) for node, path_prob in enumerate(path_probs)
            ]
        # Candidates are (path probability, frontier node, rank among its siblings).
        candidates = [
            (path_prob * self._acceptance.prob(rank, draft_prob), node, rank)
            for node, path_prob in enumerate(path_probs)
            for rank, draft_prob in enumerate(draft_probs(node)[: self.siblings])
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        levels, count, order = self._best_addition(
            np.array([candidate[0] for candidate in candidates]), this_round.width, this_round.expected_tokens
        )
        drafted, expanded = [0] * len(path_probs), [0] * len(path_probs)
        for index in order[:count]:
            candidate, descendant_level = divmod(int(index), levels + 1)
            _, node, rank = candidates[candidate]
            if descendant_level == 0:
                drafted[node] += self._add_children(drafted[node], rank)
            elif descendant_level == 1 and rank < drafted[node]:
                expanded[node] = max(expanded[node], rank + 1)
        child_probs = {(node, rank): path_prob for path_prob, node, rank in candidates}
        children = [
            Children(tuple(child_probs[node, rank] for rank in range(count)), expand_count)
            for node, (count, expand_count) in enumerate(zip(drafted, expanded, strict=True))
        ]
        this_round.expected_tokens += sum(sum(each.path_probs) for each in children)
        return children

    def _add_children(self, drafted: int, rank: int) -> int:
        """Return how many children to add so that a node has the child of a rank; 0 where none fit."""
        this_round = self._round
        added = max(rank + 1 - drafted, 0)
        forks = added - (added > 0 and drafted == 0)
        fits = this_round.width + added <= self._max_width and this_round.leaves + forks <= self._max_branches
        if not fits:
            return 0
        this_round.width, this_round.leaves = this_round.width + added, this_round.leaves + forks
        return added

    def _forced_child(self, path_prob: float, probs: NDArray[np.float64]) -> Children:
        """Return one child, which gets a child of its own where a second level hardly costs more."""
        this_round = self._round
        this_round.width += 1
        forced_levels = 2 if self._v(2) >= _STEEP_COST else 1
        return Children((path_prob * self._acceptance.prob(0, probs[0]),), this_round.passes < forced_levels)

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        self._acceptance.record(probs[: self.siblings], accepted)

    def record_skipped_round(self) -> None:
        self._acceptance.decay()

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return {**self._acceptance.saved_statistics(), "pass": self._draft_pass_seconds.saved()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._acceptance.restore_statistics(saved)
        self._draft_pass_seconds.restore(saved["pass"])

    def _best_addition(
        self, candidates: NDArray[np.float64], width: int, expected_tokens: float
    ) -> tuple[int, int, NDArray[np.int64]]:
        """Find the candidates and descendants whose addition maximises the speed.

        Args:
            candidates: Path probabilities of possible children, float64, descending.
            width: Width of the tree without them.
            expected_tokens: Expected tokens of the tree without them.

        Returns:
            The number of descendant levels, the number of nodes to add, and node indices in order of
            probability. Index i * (levels + 1) + d is the expected descendant of candidate i, d levels below;
            the candidate itself for d = 0.
        """
        this_round = self._round
        if len(candidates) == 1:
            return self._best_chain(float(candidates[0]), width, expected_tokens)
        best_speed, best = 0.0, (0, 0, np.zeros(0, np.int64))
        for levels in range(min(this_round.draft_length - this_round.passes, _MAX_LOOKAHEAD_LEVELS) + 1):
            descendants = self._acceptance.typical_prob ** np.arange(levels + 1)
            grid = (candidates[:, None] * descendants).ravel()
            order = np.argsort(-grid, kind="stable")[: self._max_width - width]
            tokens = expected_tokens + np.concatenate([[0.0], np.cumsum(grid[order])])
            passes = this_round.passes + levels
            cost = passes * this_round.draft_pass_cost + this_round.pass_costs(width, len(tokens))
            speeds = tokens / cost
            count = int(speeds.argmax())
            if speeds[count] > best_speed:
                best_speed, best = float(speeds[count]), (levels, count, order)
        return best

    def _best_chain(
        self, candidate: float, width: int, expected_tokens: float
    ) -> tuple[int, int, NDArray[np.int64]]:
        """Return the result of `_best_addition` for one candidate, with descendants to the draft length."""
        this_round = self._round
        levels = min(this_round.draft_length - this_round.passes + 1, self._max_width - width)
        counts = np.arange(levels + 1)
        descendants = np.cumsum(self._acceptance.typical_prob ** counts[:-1])
        tokens = expected_tokens + candidate * np.concatenate([[0.0], descendants])
        passes = this_round.passes + np.maximum(counts - 1, 0)
        cost = passes * this_round.draft_pass_cost + this_round.pass_costs(width, levels + 1)
        count = int((tokens / cost).argmax())
        return max(count - 1, 0), count, counts[:count]


@dataclass(slots=True)
class _Round:
    """State of one round.

    Attributes:
        draft_length: Limit for the draft passes.
        draft_pass_cost: Cost of a draft pass, in target steps.
        costs: Cost of a verify pass of width 1, 2, and so on, float64.
        started: When the draft began; once it is complete, when the verify pass began.
        is_forced: The draft is made even where none is expected to save time.
        passes: Draft passes so far.
        width: Tokens of the tree with its root.
        leaves: Leaves of the tree.
        expected_tokens: Expected tokens of the round.
    """

    draft_length: int
    draft_pass_cost: float
    costs: NDArray[np.float64]
    started: float
    is_forced: bool = False
    passes: int = 0
    width: int = 1
    leaves: int = 1
    expected_tokens: float = 1.0

    def pass_costs(self, width: int, count: int) -> NDArray[np.float64]:
        """Return the costs of `count` widths from `width` on. Width 0 costs a target step."""
        indices = np.maximum(np.arange(width, width + count) - 1, 0)
        return self.costs[indices]


class _ChildAcceptance:
    """Acceptance probability of a child by its rank and by the draft model's probability at that rank.

    The tokens themselves do not matter, because the tree must not depend on the tokens that were drawn. The
    prior is that the draft model's probabilities are right.
    """

    # Bounds between classes of draft probabilities, and the prior acceptance probability of each class.
    _EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    _PRIOR = np.array([0.01, 0.035, 0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98])
    # Weights in drafted tokens: of the prior, and of the counts after a pause.
    _PRIOR_WEIGHT = 4.0
    _WEIGHT_AFTER_PAUSE = 2.0
    # Prior acceptance probability of a node's best child where the draft probability is unknown.
    _TYPICAL_PRIOR = 0.7

    def __init__(self, ranks: int) -> None:
        nothing = np.zeros((ranks, len(self._PRIOR)))
        self._by_prob = AcceptanceCounts(nothing, nothing)
        self._by_rank = AcceptanceCounts(nothing[:, 0], nothing[:, 0])

    def prob(self, rank: int, draft_prob: float) -> float:
        """Return the acceptance probability of the `rank`-th best child, given its draft probability."""
        category = rank, bisect_right(self._EDGES, draft_prob)
        accepted = self._by_prob.accepted[category] + self._PRIOR_WEIGHT * self._PRIOR[category[1]]
        return float(accepted / (self._by_prob.drafted[category] + self._PRIOR_WEIGHT))

    @property
    def typical_prob(self) -> float:
        """Acceptance probability of the best child of a node whose draft probabilities are unknown."""
        accepted = float(self._by_rank.accepted.max()) + self._PRIOR_WEIGHT * self._TYPICAL_PRIOR
        return accepted / (float(self._by_rank.drafted.max()) + self._PRIOR_WEIGHT)

    def record(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        """Record which child of a node was accepted; see `TreeGrowth.record_outcome`."""
        for rank in range(len(self._by_rank.accepted)):
            self._by_rank.record((rank,), rank == accepted)
        for rank, prob in enumerate(probs):
            self._by_prob.record((rank, bisect_right(self._EDGES, float(prob))), rank == accepted)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return all counts as named arrays."""
        return {"seen": self._by_prob.saved(), "any": self._by_rank.saved()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the arrays of `saved_statistics`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array holds impossible values.
        """
        self._by_prob.restore(saved["seen"])
        self._by_rank.restore(saved["any"])

    def limit_weight(self) -> None:
        """Reduce the weight of the counts after a pause."""
        self._by_prob.limit_weight(self._WEIGHT_AFTER_PAUSE)
        self._by_rank.limit_weight(self._WEIGHT_AFTER_PAUSE)

    def decay(self) -> None:
        """Move all counts a little towards their prior."""
        self._by_prob.decay()
        self._by_rank.decay()
