"""What one drafter's guesses have been worth lately: how often they came true, and what asking costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.running_stats import AcceptanceCounts, RunningMean
from edgespec.engine.tree import TokenTree

__all__ = ["MOST_SURE", "AcceptanceStats"]

# No sum of chances is believed to be more, so that whoever says something else keeps a little of his own.
MOST_SURE = 0.98


class AcceptanceStats:
    """Chances of one drafter's nodes, by depth and rank, and a lookup's by how long it has been right.

    A lookup that has found the passage being copied goes on being right: its streak says so. Whoever is not
    asked all the time begins with good credit, so that it is tried. Only tokens that were emitted, and
    shapes, are looked at; what was drawn for a guess is not.
    seconds, levels, rows: of a proposal that guessed something. silent: the last one did not.
    """

    # A lookup's streaks, in tokens that were right: none, 1 to 3, 4 to 15, and 16 or more.
    _STREAKS = (1, 4, 16)
    # Believed before anything was seen: the chance, in [0, 1], of a node's first, second and any later child;
    # a lookup's by its streak, a row each. Round guesses, with which the simulations in
    # tests/auto/test_combined_drafter.py lose next to nothing against the better drafter alone.
    _PRIOR = np.array([[0.4, 0.1, 0.05], [0.6, 0.1, 0.05], [0.75, 0.1, 0.05], [0.9, 0.05, 0.02]])
    _CREDIT = np.array([[0.85, 0.1, 0.05]])
    # They weigh as much as so many tries, which a few rounds outweigh.
    _PRIOR_TRIES = 4.0
    # After a long time without a guess what was seen weighs no more than so many tries.
    _DOUBTED_TRIES = 2.0

    def __init__(self, lookup: bool) -> None:
        prior = (self._PRIOR if lookup else self._CREDIT)[:, None] * self._PRIOR_TRIES
        # [streak, first level or later, rank]
        hits = np.repeat(prior, 2, axis=1)
        self._tally = AcceptanceCounts(hits, np.full(hits.shape, self._PRIOR_TRIES))
        self._streaks = len(hits)
        self._streak = 0
        self.seconds, self.levels, self.rows = RunningMean(), RunningMean(), RunningMean()
        self.silent = False

    @property
    def _bucket(self) -> int:
        return bisect_right(self._STREAKS, self._streak) if self._streaks > 1 else 0

    def _table(self) -> NDArray[np.float64]:
        """The chance of a child as things are: float64 [first level or later, rank]."""
        table: NDArray[np.float64] = self._tally.hits[self._bucket] / self._tally.tries[self._bucket]
        return table

    def asked(self, tree: TokenTree, seconds: float) -> None:
        """It proposed this."""
        self.silent = not tree.drafted
        if tree.drafted:
            self.seconds.add(seconds)
            self.levels.add(max(tree.depths))
            self.rows.add(tree.drafted)

    def chances(self, tree: TokenTree) -> list[float]:
        """The chance of each node, in [0, 1], given that its parent is accepted; the root's is 1."""
        table = self._table()
        return [1.0, *(float(table[at]) for at in _cells(tree)[1:])]

    @property
    def level_seconds(self) -> float:
        """What a level of a proposal takes."""
        return self.seconds.value / max(self.levels.value, 1.0)

    @property
    def level_rows(self) -> float:
        """The guesses of a level."""
        return self.rows.value / max(self.levels.value, 1.0)

    def survival(self, levels: int) -> list[float]:
        """For each level of a proposal it has not made yet, the chance that the text is still in it."""
        table = self._table()
        # A drafter of chains has one guess a level; others share a level among their ranks.
        is_chain = self.rows.value <= self.levels.value
        any_child = table[:, 0] if is_chain else np.minimum(table.sum(axis=1), MOST_SURE)
        return list(accumulate((float(any_child[min(level, 1)]) for level in range(levels)), mul))

    def learn(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Its tree of this round, and the tokens that were emitted."""
        bucket = self._bucket
        cells = _cells(tree)
        right = tree.walk(tokens)
        self._streak += len(right) - 1
        for node, came_true in zip_longest(right[: len(tokens)], right[1:]):
            children = tree.children(node)
            for child in children:
                self._tally.count((bucket, *cells[child]), child == came_true)
            if children and came_true is None:
                self._streak = 0
        if not tree.drafted:
            self._streak = 0

    def kept(self) -> dict[str, NDArray[np.float64]]:
        """All of it by name, for another run."""
        return {
            "tally": self._tally.kept(),
            "seconds": self.seconds.kept(),
            "levels": self.levels.kept(),
            "rows": self.rows.kept(),
        }

    def restore(self, kept: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from what was kept. Raises KeyError, ValueError."""
        self._tally.restore(kept["tally"])
        self.seconds.restore(kept["seconds"])
        self.levels.restore(kept["levels"])
        self.rows.restore(kept["rows"])

    def doubt(self) -> None:
        """It was not asked for long: what was seen may hold no more."""
        self._tally.doubt(self._DOUBTED_TRIES)


def _cells(tree: TokenTree) -> list[tuple[int, int]]:
    """Of each node: 0 on the first level, 1 further down, and its rank among its siblings, at most 2."""
    ranks = [0] * tree.width
    cells = [(0, 0)]
    for parent in tree.parents[1:]:
        cells.append((min(parent, 1), min(ranks[parent], 2)))
        ranks[parent] += 1
    return cells
