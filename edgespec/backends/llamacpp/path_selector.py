"""Compute the logits of DFlash 2 heads, which score pairs of candidates at neighbouring positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PathSelector"]


class PathSelector:
    """The candidates for each draft token of a block, and their scores after each candidate before them.

    llama.cpp computes the candidates and scores in the pass over the block. Only candidates have finite
    logits.

    Args:
        lattice: One row per draft token: the ids of `count` candidates, followed by a matrix
            [candidates of the previous draft token, candidates] of scores. All rows of the first draft
            token's matrix are equal.
        count: Number of candidates per draft token.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, lattice: NDArray[np.float32], count: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._candidates = lattice[:, :count].astype(np.int64)
        self._scores = lattice[:, count : count + count * count].reshape(-1, count, count)
        # Index of the candidate at each depth of the most likely draft.
        self._path: list[int] = []
        for scores in self._scores:
            self._path.append(int(scores[self._path[-1] if self._path else 0].argmax()))

    def logits(self, token: int, depth: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] after `token`, which is at this depth below the block's first token.

        If `token` is not a candidate, the most likely candidate at that depth is used instead.
        """
        previous = 0
        if depth:
            found = np.flatnonzero(self._candidates[depth - 1] == token)
            previous = int(found[0]) if found.size else self._path[depth - 1]
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[self._candidates[depth]] = self._scores[depth, previous]
        return row
