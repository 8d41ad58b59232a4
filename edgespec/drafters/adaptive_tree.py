"""A draft that grows as far as its nodes are likely to pay for their rows.

Sources: EAGLE-2 (arXiv 2406.16858) expands the nodes of largest path value first; Sequoia (arXiv
2402.12374) sizes a tree by what a pass of its width really costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.costs.curve import Curve, gentle
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.running_stats import AcceptanceCounts, RunningMean
from edgespec.drafters.tree_growth import Children, DraftProbs, TreeGrowth

__all__ = ["AdaptiveTreeGrowth"]


class AdaptiveTreeGrowth(TreeGrowth):
    """Grows where a node's chance of acceptance pays for its row and for the draft's own passes.

    Each level weighs its possible children together with what may follow them: of all sets of the
    likeliest, the one with the most expected tokens for each plain step of cost is taken,
    S = (1 + sum of path values) / (draft passes * c + v(rows)). v need not be monotone; c is measured.

    curve: v(m), asked anew each round. siblings: the most children of one node; 1 grows chains.
    clock: seconds.
    """

    chooses_length = True

    def __init__(
        self,
        limits: PassLimits | None = None,
        curve: Curve = gentle,
        siblings: int = 4,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        limits = limits or PassLimits()
        self.siblings = siblings if limits.max_branches > 1 else 1
        self._rows = min(limits.max_width, _MOST_ROWS)
        self._branches = limits.max_branches
        self._curve = curve
        self._chances = _Chances(self.siblings)
        self._clock = clock
        self._pass_seconds, self._plain_seconds = RunningMean(), RunningMean()
        self._dares = False
        self._round = _Round(0, 0.0, np.ones(1), 0.0)

    @property
    def pass_cost(self) -> float:
        """What a pass of the draft model costs, in plain steps of the target."""
        if not self._pass_seconds.value or not self._plain_seconds.value:
            return _UNMEASURED
        return self._pass_seconds.value / self._plain_seconds.value

    def begin_round(self, draft_length: int) -> bool:
        costs = np.array([self._curve(rows) for rows in range(1, self._rows + 1)])
        self._round = _Round(draft_length, self.pass_cost, costs, self._clock(), dares=self._dares)
        self._dares = False
        depth, _, _ = self._best(np.ones(1), rows=0, expected=0.0)
        return depth > 0 or self._round.dares

    def force_draft(self) -> None:
        self._dares = True
        self._chances.doubt()

    def finish_draft(self) -> None:
        now = self._clock()
        if self._round.passes:
            self._pass_seconds.add((now - self._round.moment) / self._round.passes)
        self._round.moment = now

    def record_verify_pass(self, width: int) -> None:
        if self._round.passes:
            self._plain_seconds.add((self._clock() - self._round.moment) / self._curve(width))
            self._round.passes = 0  # this pass was of that draft; the next one may be of none

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        now = self._round
        now.passes += 1
        if now.dares:
            return [self._dared(now, value, draft_probs(node)) for node, value in enumerate(path_probs)]
        reals = [
            (value * self._chances.of(rank, prob), node, rank)
            for node, value in enumerate(path_probs)
            for rank, prob in enumerate(draft_probs(node)[: self.siblings])
        ]
        reals.sort(key=lambda real: -real[0])
        depth, size, order = self._best(np.array([real[0] for real in reals]), now.rows, now.expected)
        drafted, run = [0] * len(path_probs), [0] * len(path_probs)
        for at in order[:size]:
            which, further = divmod(int(at), depth + 1)
            _, node, rank = reals[which]
            if further == 0:
                more = max(rank + 1 - drafted[node], 0)
                forks = more - (more > 0 and drafted[node] == 0)
                if now.rows + more <= self._rows and now.leaves + forks <= self._branches:
                    now.rows, now.leaves = now.rows + more, now.leaves + forks
                    drafted[node] += more
            elif further == 1 and rank < drafted[node]:
                run[node] = max(run[node], rank + 1)
        path_values = {(node, rank): value for value, node, rank in reals}
        children = [
            Children(tuple(path_values[node, rank] for rank in range(count)), go_on)
            for node, (count, go_on) in enumerate(zip(drafted, run, strict=True))
        ]
        now.expected += sum(sum(each.path_probs) for each in children)
        return children

    def _dared(self, now: _Round, value: float, probs: NDArray[np.float64]) -> Children:
        """One child, and one more after the first."""
        now.rows += 1
        return Children((value * self._chances.of(0, probs[0]),), now.passes < self._dared_levels)

    @property
    def _dared_levels(self) -> int:
        """So deep is a draft that is made to see whether it pays."""
        return 2 if self._curve(2) >= _STEEP else 1

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        self._chances.learn(probs[: self.siblings], accepted)

    def record_skipped_round(self) -> None:
        self._chances.fade()

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return {**self._chances.kept(), "pass": self._pass_seconds.kept()}

    def restore_statistics(self, kept: Mapping[str, NDArray[Any]]) -> None:
        self._chances.restore(kept)
        self._pass_seconds.restore(kept["pass"])

    def _best(
        self, reals: NDArray[np.float64], rows: int, expected: float
    ) -> tuple[int, int, NDArray[np.int64]]:
        """What to add to `rows` rows that bring `expected` tokens: (levels after this one, size, order).

        Order is of the grid [reals, 0 to levels]: a real child, and what is likely to follow it level by
        level. Its first `size` are worth adding.
        """
        now = self._round
        if len(reals) == 1:
            return self._best_chain(float(reals[0]), rows, expected)
        best, found = 0.0, (0, 0, np.zeros(0, np.int64))
        for depth in range(min(now.levels - now.passes, _LOOK_AHEAD) + 1):
            grid = (reals[:, None] * self._chances.typical ** np.arange(depth + 1)).ravel()
            order = np.argsort(-grid, kind="stable")[: self._rows - rows]
            tokens = expected + np.concatenate([[0.0], np.cumsum(grid[order])])
            cost = (now.passes + depth) * now.pass_cost + now.costs_from(rows, len(tokens))
            speeds = tokens / cost
            size = int(speeds.argmax())
            if speeds[size] > best:
                best, found = float(speeds[size]), (depth, size, order)
        return found

    def _best_chain(self, real: float, rows: int, expected: float) -> tuple[int, int, NDArray[np.int64]]:
        """The same for one child and what follows it, looked at down to the end of a draft."""
        now = self._round
        levels = min(now.levels - now.passes + 1, self._rows - rows)
        counts = np.arange(levels + 1)
        tokens = expected + real * np.concatenate([[0.0], np.cumsum(self._chances.typical ** counts[:-1])])
        passes = now.passes + np.maximum(counts - 1, 0)
        size = int((tokens / (passes * now.pass_cost + now.costs_from(rows, levels + 1))).argmax())
        return max(size - 1, 0), size, counts[:size]


# Deeper or wider than this, one round's guess of what pays is worth nothing.
_LOOK_AHEAD = 4
_MOST_ROWS = 64
# Where two rows cost about as much as two passes, a try is of two levels: one would be no cheaper.
_STEEP = 1.9
# What a pass of the draft is taken to cost before it was measured.
_UNMEASURED = 0.2


@dataclass(slots=True)
class _Round:
    """One round of growing. costs: float64 [most rows], the cost of a pass of 1, 2, ... rows."""

    levels: int
    pass_cost: float
    costs: NDArray[np.float64]
    moment: float
    dares: bool = False
    passes: int = 0
    rows: int = 1
    leaves: int = 1
    expected: float = 1.0

    def costs_from(self, rows: int, count: int) -> NDArray[np.float64]:
        """The cost of `rows` rows, one more, and so on. No row at all is a plain step given up: no less."""
        at = np.maximum(np.arange(rows, rows + count) - 1, 0)
        return self.costs[at]


class _Chances:
    """How often a child comes true, by its rank and by the draft's probability at that rank.

    Not by its own token: what is decided with this must not depend on what was drawn. The prior is that
    the draft's probabilities are right; what was seen is forgotten, so that all is tried again some day.
    """

    _EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    _PRIOR = np.array([0.01, 0.035, 0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98])
    _PRIOR_TRIES = 4.0
    _DOUBTED_TRIES = 2.0
    _TYPICAL = 0.7

    def __init__(self, ranks: int) -> None:
        nothing = np.zeros((ranks, len(self._PRIOR)))
        self._seen = AcceptanceCounts(nothing, nothing)
        # Whatever the draft's probability was.
        self._any = AcceptanceCounts(nothing[:, 0], nothing[:, 0])

    def of(self, rank: int, prob: float) -> float:
        """The chance of the child of this rank, where the draft gives its `rank`-th best token `prob`."""
        at = rank, bisect_right(self._EDGES, prob)
        hits = self._seen.hits[at] + self._PRIOR_TRIES * self._PRIOR[at[1]]
        return float(hits / (self._seen.tries[at] + self._PRIOR_TRIES))

    @property
    def typical(self) -> float:
        """The chance of the best child of a node of which nothing is known yet."""
        hits = float(self._any.hits.max()) + self._PRIOR_TRIES * self._TYPICAL
        return hits / (float(self._any.tries.max()) + self._PRIOR_TRIES)

    def learn(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        for rank in range(len(self._any.hits)):
            self._any.count((rank,), rank == accepted)
        for rank, prob in enumerate(probs):
            self._seen.count((rank, bisect_right(self._EDGES, float(prob))), rank == accepted)

    def kept(self) -> dict[str, NDArray[Any]]:
        """All of it by name."""
        return {"seen": self._seen.kept(), "any": self._any.kept()}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what was kept. Raises KeyError, ValueError."""
        self._seen.restore(kept["seen"])
        self._any.restore(kept["any"])

    def doubt(self) -> None:
        """What was seen may hold no more."""
        self._seen.doubt(self._DOUBTED_TRIES)
        self._any.doubt(self._DOUBTED_TRIES)

    def fade(self) -> None:
        """Forget a little of everything."""
        self._seen.fade()
        self._any.fade()
