"""Grow draft trees, with a fixed shape or according to the draft probabilities and the cost of verification.

As in EAGLE-2 (arXiv 2406.16858), the nodes that are most likely to be accepted are expanded first. As in
Sequoia (arXiv 2402.12374), the size of the tree depends on the cost of verifying it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.constants import (
    ASSUMED_DRAFT_PASS_COST,
    DRAFT_PROB_EDGES,
    DRAFT_PROB_PRIOR,
    MAX_LOOKAHEAD_LEVELS,
    MAX_TREE_WIDTH,
    PRIOR_WEIGHT,
    STEEP_COST,
    TYPICAL_PRIOR,
    WEIGHT_AFTER_PAUSE,
)
from edgespec.methods.costs.curve import CostFunction, PassLimits, assumed_cost
from edgespec.methods.running_stats import AcceptanceCounts, RunningMean

__all__ = ["AdaptiveTreeGrowth", "Children", "DraftProbs", "FixedShape", "TreeGrowth"]


# Function that returns the draft model's highest next-token probabilities after a node, in descending order.
DraftProbs: TypeAlias = Callable[[int], NDArray[np.float64]]


class Children(NamedTuple):
    """How many children to draft for a tree node, and how many of them are expanded in turn.

    Both numbers are chosen before any token is sampled, because dropping a sampled token would bias rejection
    sampling.

    Attributes:
        path_probs: For each child, the estimated probability that the child and all its ancestors are
            accepted.
        expand_count: Number of children that get children themselves, starting with the most likely.
    """

    path_probs: tuple[float, ...]
    expand_count: int


class TreeGrowth(ABC):
    """Decides how a draft tree grows, one level at a time. Each drafter has its own instance.

    The drafter calls `begin_round` before drafting, `grow_level` after each draft model pass, and
    `finish_draft` when the draft is complete. After verification, it calls `record_verify_pass` and
    `record_outcome`.

    Attributes:
        drafts_chains: Whether every node has at most one child.
        siblings: Minimum number of candidate tokens to sample for each node.
        chooses_length: Whether a draft may end before it reaches the draft length.
    """

    drafts_chains: bool
    siblings: int = 1
    chooses_length: bool = False

    @abstractmethod
    def begin_round(self, draft_length: int) -> bool:
        """Begin a round with at most `draft_length` draft model passes. Return False to skip drafting."""

    @abstractmethod
    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        """Return the children to add to each node of the current level.

        Args:
            path_probs: For each node of the current level, the estimated probability that the node and all
                its ancestors are accepted.
            draft_probs: Returns the draft model's highest next-token probabilities after a node of the
                current level.
        """

    def force_draft(self) -> None:  # noqa: B027
        """Make the next draft short but not empty, even if drafting is not expected to save time."""

    def finish_draft(self) -> None:  # noqa: B027
        """Record the time at which drafting ends and the verify pass begins."""

    def record_verify_pass(self, width: int) -> None:  # noqa: B027
        """Record that the target has just verified `width` tokens, including the root of the draft tree."""

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:  # noqa: B027
        """Record which child of a draft tree node the target accepted.

        Args:
            probs: The draft model's highest probabilities after the node, float64, in descending order.
            accepted: Index of the accepted child, or None if the target chose another token.
        """

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return acceptance and timing statistics as named arrays, to be saved for later runs."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Restore the statistics returned by `saved_statistics`. See `Drafter.restore_statistics`."""


class FixedShape(TreeGrowth):
    """A tree with a fixed number of children per node at each depth.

    Args:
        branches: Number of children per node at each depth, such as (3, 2). Deeper nodes have one child, so
            an empty tuple gives a chain.
    """

    def __init__(self, branches: tuple[int, ...] = ()) -> None:
        self.drafts_chains = set(branches) <= {1}
        self._branches = branches
        self._depth = 0

    def begin_round(self, draft_length: int) -> bool:
        self._depth = 0
        return True

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        count = self._branches[self._depth] if self._depth < len(self._branches) else 1
        self._depth += 1
        return [Children((1.0,) * count, count)] * len(path_probs)


class AdaptiveTreeGrowth(TreeGrowth):
    """Grows a draft tree level by level to maximise the expected decoding speed.

    The expected speed of a draft-and-verify round is S = (1 + sum of path probabilities) / (draft passes * c
    + v(width)). The numerator is the expected number of emitted tokens. In the denominator, c is the measured
    duration of a draft model pass and v(width) that of a verify pass, both relative to a single-token target
    pass.

    Args:
        limits: Limits on the width and branches of a verify pass, and on the number of draft model passes.
        v: Returns the duration of a verify pass of a given width, relative to a single-token target pass. The
            durations may change between drafts.
        siblings: Maximum number of children per node. If 1, the tree is a chain.
        clock: Returns the current time in seconds.
        initial_pass_cost: Duration of a draft model pass, relative to a single-token target pass, to assume
            until drafts have been measured. 0 if unknown.
    """

    chooses_length = True

    def __init__(
        self,
        limits: PassLimits | None = None,
        v: CostFunction = assumed_cost,
        siblings: int = 4,
        clock: Callable[[], float] = perf_counter,
        initial_pass_cost: float = 0.0,
    ) -> None:
        limits = limits or PassLimits()
        self.siblings = siblings if limits.max_branches > 1 else 1
        self.drafts_chains = self.siblings == 1
        self._max_width = min(limits.max_width, MAX_TREE_WIDTH)
        self._max_branches, self._max_passes = limits.max_branches, limits.max_draft_passes
        self._v = v
        self._acceptance = _ChildAcceptance(self.siblings)
        self._initial_pass_cost = initial_pass_cost or ASSUMED_DRAFT_PASS_COST
        self._clock = clock
        self._draft_pass_seconds, self._target_step_seconds = RunningMean(), RunningMean()
        self._is_forced = False
        self._round = _Round(0, 0.0, np.ones(1), 0.0)

    @property
    def draft_pass_cost(self) -> float:
        """Average duration of a draft model pass, relative to a single-token target pass."""
        if not self._draft_pass_seconds.value or not self._target_step_seconds.value:
            return self._initial_pass_cost
        return self._draft_pass_seconds.value / self._target_step_seconds.value

    def begin_round(self, draft_length: int) -> bool:
        # Compute costs only for the widths needed, because on small models, computing all of them takes
        # longer than drafting. A chain has at most `draft_length` tokens after the root.
        widths = draft_length + 2 if self.drafts_chains else self._max_width
        costs = np.array([self._v(width) for width in range(1, min(widths, self._max_width) + 1)])
        self._round = _Round(draft_length, self.draft_pass_cost, costs, self._clock(), self._is_forced)
        self._is_forced = False
        levels, _, _ = self._best_addition(np.ones(1), width=0, expected_tokens=0.0)
        if levels or self._round.is_forced:
            return True
        self._acceptance.decay()
        return False

    def force_draft(self) -> None:
        self._is_forced = True
        self._acceptance.limit_weight()

    def finish_draft(self) -> None:
        now = self._clock()
        if self._round.passes:
            passes = min(self._round.passes, self._max_passes)
            self._draft_pass_seconds.add((now - self._round.started) / passes)
        self._round.started = now

    def record_verify_pass(self, width: int) -> None:
        if self._round.passes:
            self._target_step_seconds.add((self._clock() - self._round.started) / self._v(width))
            self._round.passes = 0

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        this_round = self._round
        this_round.passes += 1
        if this_round.is_forced:
            this_round.width += 1
            path_prob = path_probs[0] * self._acceptance.prob(0, draft_probs(0)[0])
            return [Children((path_prob,), this_round.passes < (2 if self._v(2) >= STEEP_COST else 1))]
        candidates = [
            (path_prob * self._acceptance.prob(rank, draft_prob), node, rank)
            for node, path_prob in enumerate(path_probs)
            for rank, draft_prob in enumerate(draft_probs(node)[: self.siblings])
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        probs = np.array([candidate[0] for candidate in candidates])
        levels, count, order = self._best_addition(probs, this_round.width, this_round.expected_tokens)
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
        this_round = self._round
        added = max(rank + 1 - drafted, 0)
        width = this_round.width + added
        leaves = this_round.leaves + added - (added > 0 and drafted == 0)
        if width > self._max_width or leaves > self._max_branches:
            return 0
        this_round.width, this_round.leaves = width, leaves
        return added

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        self._acceptance.record(probs[: self.siblings], accepted)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return {**self._acceptance.saved_statistics(), "pass": self._draft_pass_seconds.saved()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._acceptance.restore_statistics(saved)
        self._draft_pass_seconds.restore(saved["pass"])

    def _best_addition(
        self, candidates: NDArray[np.float64], width: int, expected_tokens: float
    ) -> tuple[int, int, NDArray[np.int64]]:
        this_round = self._round
        if len(candidates) == 1:
            return self._best_chain(float(candidates[0]), width, expected_tokens)
        best_speed, best = 0.0, (0, 0, np.zeros(0, np.int64))
        for levels in range(min(this_round.draft_length - this_round.passes, MAX_LOOKAHEAD_LEVELS) + 1):
            descendants = self._acceptance.typical_prob ** np.arange(levels + 1)
            grid = (candidates[:, None] * descendants).ravel()
            order = np.argsort(-grid, kind="stable")[: self._max_width - width]
            tokens = expected_tokens + np.concatenate([[0.0], np.cumsum(grid[order])])
            passes = min(this_round.passes + levels, self._max_passes)
            cost = passes * this_round.draft_pass_cost + this_round.pass_costs(width, len(tokens))
            speeds = tokens / cost
            count = int(speeds.argmax())
            if speeds[count] > best_speed:
                best_speed, best = float(speeds[count]), (levels, count, order)
        return best

    def _best_chain(
        self, candidate: float, width: int, expected_tokens: float
    ) -> tuple[int, int, NDArray[np.int64]]:
        this_round = self._round
        levels = min(this_round.draft_length - this_round.passes + 1, self._max_width - width)
        counts = np.arange(levels + 1)
        descendants = np.cumsum(self._acceptance.typical_prob ** counts[:-1])
        tokens = expected_tokens + candidate * np.concatenate([[0.0], descendants])
        passes = np.minimum(this_round.passes + np.maximum(counts - 1, 0), self._max_passes)
        cost = passes * this_round.draft_pass_cost + this_round.pass_costs(width, levels + 1)
        count = int((tokens / cost).argmax())
        return max(count - 1, 0), count, counts[:count]


@dataclass(slots=True)
class _Round:
    """State of one draft-and-verify round.

    Attributes:
        draft_pass_cost: Duration of a draft model pass, relative to a single-token target pass.
        costs: Durations of verify passes over 1, 2, 3, ... tokens, relative to a single-token target pass;
            float64.
        started: Time at which drafting began, or at which the verify pass began if the draft is complete.
        is_forced: Whether to draft even if drafting is not expected to save time.
        passes: Number of levels drafted so far.
        width: Number of tokens in the tree, including the root.
        expected_tokens: Expected number of tokens emitted with the current draft.
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
        return self.costs[np.maximum(np.arange(width, width + count) - 1, 0)]


class _ChildAcceptance:
    """Estimates how likely a drafted node is to be accepted, given its rank and its draft probability.

    The estimate ignores token ids, because the tree's shape must not depend on which tokens were sampled.
    Initially, the draft model's probabilities are assumed to be correct.
    """

    _PRIOR = np.array(DRAFT_PROB_PRIOR)

    def __init__(self, ranks: int) -> None:
        nothing = np.zeros((ranks, len(self._PRIOR)))
        self._by_prob = AcceptanceCounts(nothing, nothing)
        self._by_rank = AcceptanceCounts(nothing[:, 0], nothing[:, 0])

    def prob(self, rank: int, draft_prob: float) -> float:
        category = rank, bisect_right(DRAFT_PROB_EDGES, draft_prob)
        accepted = self._by_prob.accepted[category] + PRIOR_WEIGHT * self._PRIOR[category[1]]
        return float(accepted / (self._by_prob.drafted[category] + PRIOR_WEIGHT))

    @property
    def typical_prob(self) -> float:
        accepted = float(self._by_rank.accepted.max()) + PRIOR_WEIGHT * TYPICAL_PRIOR
        return accepted / (float(self._by_rank.drafted.max()) + PRIOR_WEIGHT)

    def record(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        for rank in range(len(self._by_rank.accepted)):
            self._by_rank.record((rank,), rank == accepted)
        for rank, prob in enumerate(probs):
            self._by_prob.record((rank, bisect_right(DRAFT_PROB_EDGES, float(prob))), rank == accepted)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return {"seen": self._by_prob.saved(), "any": self._by_rank.saved()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._by_prob.restore(saved["seen"])
        self._by_rank.restore(saved["any"])

    def limit_weight(self) -> None:
        self._by_prob.limit_weight(WEIGHT_AFTER_PAUSE)
        self._by_rank.limit_weight(WEIGHT_AFTER_PAUSE)

    def decay(self) -> None:
        self._by_prob.decay()
        self._by_rank.decay()
