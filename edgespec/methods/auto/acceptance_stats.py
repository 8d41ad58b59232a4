"""Acceptance statistics and draft costs of one drafter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.constants import (
    LONG_TERM_PRIOR_WEIGHT,
    LOOKUP_PRIOR,
    MAX_PROB_SUM,
    MODEL_PRIOR,
    STREAKS,
)
from edgespec.methods.constants import PRIOR_WEIGHT, WEIGHT_AFTER_PAUSE
from edgespec.methods.running_stats import AcceptanceCounts, RunningMean

__all__ = ["AcceptanceStats"]


class AcceptanceStats:
    """One drafter's acceptance rates by depth and rank, and the duration and size of its drafts.

    For lookup drafters, acceptance rates also depend on how many tokens have just been accepted in a row.

    The ids of rejected tokens are not recorded, to keep rejection sampling unbiased.

    Attributes:
        draft_seconds: Mean duration of non-empty drafts, in seconds.
        levels: Mean depth of non-empty drafts.
        rows: Mean number of drafted tokens in non-empty drafts.
        was_empty: Whether the last draft was empty.
    """

    _LOOKUP_PRIOR, _MODEL_PRIOR = np.array(LOOKUP_PRIOR), np.array(MODEL_PRIOR)

    def __init__(self, is_lookup: bool) -> None:
        prior = (self._LOOKUP_PRIOR if is_lookup else self._MODEL_PRIOR)[:, None] * PRIOR_WEIGHT
        accepted = np.repeat(prior, 2, axis=1)
        self._counts = AcceptanceCounts(accepted, np.full(accepted.shape, PRIOR_WEIGHT))
        self._has_streaks = len(accepted) > 1
        self._streak = 0
        self.draft_seconds, self.levels, self.rows = RunningMean(), RunningMean(), RunningMean()
        self.was_empty = False

    @property
    def _streak_class(self) -> int:
        return bisect_right(STREAKS, self._streak) if self._has_streaks else 0

    def _probs(self, *, long_term: bool = False) -> NDArray[np.float64]:
        counts = self._counts
        probs = (
            counts.long_term_rates(LONG_TERM_PRIOR_WEIGHT) if long_term else counts.accepted / counts.drafted
        )
        at_streak: NDArray[np.float64] = probs[self._streak_class]
        return at_streak

    def record_draft(self, tree: TokenTree, seconds: float) -> None:
        self.was_empty = not tree.drafted
        if tree.drafted:
            self.draft_seconds.add(seconds)
            self.levels.add(max(tree.depths))
            self.rows.add(tree.drafted)

    def node_probs(self, tree: TokenTree) -> list[float]:
        """Return each node's acceptance probability given that its parent is accepted. 1 for the root."""
        probs = self._probs()
        return [1.0, *(float(probs[category]) for category in _categories(tree)[1:])]

    @property
    def level_seconds(self) -> float:
        return self.draft_seconds.value / max(self.levels.value, 1.0)

    @property
    def level_rows(self) -> float:
        return self.rows.value / max(self.levels.value, 1.0)

    def reach_probs(self, levels: int, *, long_term: bool = False) -> list[float]:
        """Return, for each level of the next draft, the probability that any of its tokens is accepted.

        If `long_term` is set, the result depends less on the most recent drafts.
        """
        probs = self._probs(long_term=long_term)
        is_chain = self.rows.value <= self.levels.value
        level_probs = probs[:, 0] if is_chain else np.minimum(probs.sum(axis=1), MAX_PROB_SUM)
        return list(accumulate((float(level_probs[min(level, 1)]) for level in range(levels)), mul))

    def record_outcome(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Record which nodes of a draft tree were accepted, given the emitted tokens."""
        streak = self._streak_class
        categories = _categories(tree)
        path = tree.walk(tokens)
        self._streak += len(path) - 1
        for node, accepted in zip_longest(path[: len(tokens)], path[1:]):
            children = tree.children(node)
            for child in children:
                self._counts.record((streak, *categories[child]), child == accepted)
            if children and accepted is None:
                self._streak = 0
        if not tree.drafted:
            self._streak = 0

    def saved_statistics(self) -> dict[str, NDArray[np.float64]]:
        """Return the acceptance and timing statistics as named arrays, to save for a later run."""
        return {name: part.saved() for name, part in self._parts.items()}

    def restore_statistics(self, saved: Mapping[str, NDArray[np.float64]]) -> None:
        """Restore the arrays returned by `saved_statistics`. Damaged arrays raise KeyError or ValueError."""
        for name, part in self._parts.items():
            part.restore(saved[name])

    @property
    def _parts(self) -> dict[str, AcceptanceCounts | RunningMean]:
        means = {"seconds": self.draft_seconds, "levels": self.levels, "rows": self.rows}
        return {"tally": self._counts, **means}

    def limit_weight(self) -> None:
        """Reduce the weight of earlier results when a drafter resumes after a long pause."""
        self._counts.limit_weight(WEIGHT_AFTER_PAUSE)


def _categories(tree: TokenTree) -> list[tuple[int, int]]:
    ranks = [0] * tree.width
    categories = [(0, 0)]
    for parent in tree.parents[1:]:
        categories.append((min(parent, 1), min(ranks[parent], 2)))
        ranks[parent] += 1
    return categories
