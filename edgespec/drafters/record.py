"""What one drafter's guesses have been worth lately: how often they came true, and what asking costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree

__all__ = ["MOST_SURE", "Mean", "Record", "Tally"]

# No sum of chances is believed to be more, so that whoever says something else keeps a little of his own.
MOST_SURE = 0.98


class Mean:
    """A mean that forgets: of the last ten values or so.

    value: in the unit of what was added; 0 before the first. count: how many were.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """One value more: of the first ten each weighs the same, then a new one a tenth."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, 10)

    def kept(self) -> NDArray[np.float64]:
        """All of it, for another run."""
        return np.array([self.value, self.count])

    def restore(self, kept: NDArray[np.float64]) -> None:
        """Go on from what was kept. Raises ValueError where that is no mean."""
        if kept.shape != (2,) or not np.isfinite(kept).all() or kept[1] < 0.0:
            raise ValueError(f"{kept} is no mean")
        value, count = map(float, kept)
        # What the next values say counts for more than what another run saw.
        self.value, self.count = value, min(int(count), 5)


class Tally:
    """How often each of several things came true lately: counts in which what is older weighs less.

    hits, tries: float64 of one shape: what it begins with, and goes back to when it is not counted.
    """

    # Half of a try's weight is gone after 34 more: enough of them for a rate, and a text may change its ways.
    REMEMBERED = 0.98
    _LONG_REMEMBERED = 0.998

    def __init__(self, hits: NDArray[np.float64], tries: NDArray[np.float64]) -> None:
        self._first = hits, tries
        self.hits, self.tries = hits.copy(), tries.copy()
        self._long_hits, self._long_tries = hits.copy(), tries.copy()

    def count(self, at: tuple[int, ...], hit: bool) -> None:
        """The one `at` was tried, and came true or not."""
        self.tries[at] = self.tries[at] * self.REMEMBERED + 1.0
        self.hits[at] = self.hits[at] * self.REMEMBERED + hit
        self._long_tries[at] = self._long_tries[at] * self._LONG_REMEMBERED + 1.0
        self._long_hits[at] = self._long_hits[at] * self._LONG_REMEMBERED + hit

    def kept(self) -> NDArray[np.float64]:
        """All of it, for another run: float64 [4, ...]."""
        return np.stack([self.hits, self.tries, self._long_hits, self._long_tries])

    def restore(self, kept: NDArray[np.float64]) -> None:
        """Go on from what was kept. Raises ValueError where those are no counts of these things."""
        if kept.shape != (4, *self.hits.shape) or not np.isfinite(kept).all() or (kept < 0.0).any():
            raise ValueError(f"{kept.shape} are no counts")
        if (kept[0] > kept[1] + 1e-6).any() or (kept[2] > kept[3] + 1e-6).any():
            raise ValueError("more came true than was tried")
        self.hits, self.tries, self._long_hits, self._long_tries = kept.astype(np.float64)

    def doubt(self, most_tries: float) -> None:
        """What was seen last may hold no more: believe the rates of a longer time, as `most_tries` would."""
        np.minimum(self.tries, most_tries, out=self.tries)
        np.divide(self._long_hits * self.tries, self._long_tries, out=self.hits, where=self._long_tries > 0.0)

    def fade(self, remembered: float = REMEMBERED) -> None:
        """Nothing was tried: go back to the beginning, by 1 - `remembered` of the way."""
        for counted, first in zip((self.hits, self.tries), self._first, strict=True):
            counted += (first - counted) * (1.0 - remembered)


class Record:
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
    # tests/drafters/test_combined.py lose next to nothing against the better drafter alone.
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
        self._tally = Tally(hits, np.full(hits.shape, self._PRIOR_TRIES))
        self._streaks = len(hits)
        self._streak = 0
        self.seconds, self.levels, self.rows = Mean(), Mean(), Mean()
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
