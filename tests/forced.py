"""A logits processor that decides how a reply begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.engine.processors import Candidates, LogitsProcessor


class Begin(LogitsProcessor):
    """Makes a reply begin with given tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._count = 0

    def apply(self, candidates: Candidates) -> Candidates:
        if self._count >= len(self._tokens):
            return candidates
        return np.array([self._tokens[self._count]]), np.zeros(1)

    def push(self, token: int) -> None:
        self._count += 1

    def pop(self, count: int) -> None:
        self._count -= count
