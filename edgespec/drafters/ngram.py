"""Prompt lookup: what followed the last tokens when they stood here before.

Source: Saxena 2023, "Prompt Lookup Decoding", and LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafters.base import Drafter
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["NgramDrafter"]


class NgramDrafter(Drafter):
    """Looks the last `longest` to `shortest` tokens up in prompt and reply, longest match first.

    Of equal matches the latest wins. Cost: one dictionary entry per token and length; nothing is
    searched, so a proposal takes microseconds at any context length.
    """

    name = "ngram"

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if known > len(tokens) or self._tokens != list(tokens[:known]):
            self._tokens, self._after, known = [], {}, 0
        self._learn(tokens[known:])

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        tokens = self._tokens
        for length in self._lengths:
            at = self._after.get(tuple(tokens[-length:])) if len(tokens) > length else None
            if at is not None:
                return TokenTree.chain(tokens[-1], self._continued(at, draft_length))
        return TokenTree.chain(tokens[-1])

    def _continued(self, at: int, count: int) -> list[int]:
        """`count` tokens from `at` on; past the end they go on with what was just guessed (a loop)."""
        period = len(self._tokens) - at
        return [self._tokens[at + i % period] for i in range(count)]

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._learn(tokens)

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is learnt when its successor is known, so the end never matches itself.
            end = len(self._tokens)
            for length in self._lengths:
                if end >= length:
                    self._after[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def close(self) -> None:
        self._tokens, self._after = [], {}
