"""What one drafter's guesses have been worth lately: how often they came true, and what asking costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from edgespec.engine.tree import TokenTree

__all__ = ["Mean", "Record"]


class Mean:
    """A mean that forgets: of the last ten values or so."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 10)


class Record:
    """Chances of one drafter's nodes, by depth and rank, and a lookup's by how long it has been right.

    A lookup that has found the passage being copied goes on being right: its streak says so. Whoever is
    not asked all the time begins with good credit, and regains it in time, so that it is tried. Only tokens
    that were emitted, and shapes, are looked at; what was drawn for a guess is not.
    seconds: of one proposal. levels, rows: of one that guessed something.
    """

    _STREAKS = (1, 4, 16)
    _PRIOR = np.array([[0.4, 0.1, 0.05], [0.6, 0.1, 0.05], [0.75, 0.1, 0.05], [0.9, 0.05, 0.02]])
    _CREDIT = np.array([[0.85, 0.1, 0.05]])
    _PRIOR_TRIES = 4.0
    _REMEMBERED = 0.98
    _REMEMBERED_UNASKED = 0.995

    def __init__(self, lookup: bool) -> None:
        self._prior = (self._PRIOR if lookup else self._CREDIT)[:, None] * self._PRIOR_TRIES
        self.seconds, self.levels, self.rows = Mean(), Mean(), Mean()
        self._streak = 0
        # [streak, first level or later, rank]
        self._hits = np.repeat(self._prior, 2, axis=1)
        self._tries = np.full(self._hits.shape, self._PRIOR_TRIES)

    @property
    def _bucket(self) -> int:
        return bisect_right(self._STREAKS, self._streak) if len(self._hits) > 1 else 0

    def asked(self, tree: TokenTree, seconds: float) -> None:
        """It proposed this."""
        self.seconds.add(seconds)
        if tree.drafted:
            self.levels.add(max(tree.depths))
            self.rows.add(tree.drafted)

    def chances(self, tree: TokenTree) -> list[float]:
        """The chance of each node of its tree, given that the parent is accepted; the root's is 1."""
        table = self._hits[self._bucket] / self._tries[self._bucket]
        return [1.0, *(float(table[at]) for at in _cells(tree)[1:])]

    def survival(self, draft_length: int) -> list[float]:
        """For each level of a proposal it has not made yet, the chance that the text is still in it."""
        bucket = self._bucket
        any_child = np.minimum((self._hits[bucket] / self._tries[bucket]).sum(axis=1), 0.98)
        if not self.rows.count:
            return []
        # A drafter of chains has one guess a level; others share a level among their ranks.
        if self.rows.value <= self.levels.value:
            any_child = self._hits[bucket, :, 0] / self._tries[bucket, :, 0]
        levels = min(draft_length, round(self.levels.value))
        return list(accumulate((float(any_child[min(level, 1)]) for level in range(levels)), mul))

    def learn(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Its tree of this round, and the tokens that were emitted."""
        bucket = self._bucket
        cells = _cells(tree)
        node = 0
        for token in tokens:
            children = tree.children(node)
            if not children:
                break
            right = tree.child(node, token)
            for child in children:
                at = (bucket, *cells[child])
                self._tries[at] = self._tries[at] * self._REMEMBERED + 1.0
                self._hits[at] = self._hits[at] * self._REMEMBERED + (child == right)
            if right is None:
                self._streak = 0
                break
            self._streak += 1
            node = right
        if not tree.drafted:
            self._streak = 0

    def fade(self) -> None:
        """A round went by in which it was not asked: one day it is tried again."""
        back = 1.0 - self._REMEMBERED_UNASKED
        self._hits += (self._prior - self._hits) * back
        self._tries += (self._PRIOR_TRIES - self._tries) * back


def _cells(tree: TokenTree) -> list[tuple[int, int]]:
    """For each node: is it on a later level than the first, and its rank among its siblings, at most 2."""
    ranks = [0] * tree.width
    cells = [(0, 0)]
    for parent in tree.parents[1:]:
        cells.append((min(parent, 1), min(ranks[parent], 2)))
        ranks[parent] += 1
    return cells
