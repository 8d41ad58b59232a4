"""Prompt lookup decoding: find an earlier occurrence of the last tokens, and draft what followed it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.base import Drafter, DrafterMemory

__all__ = ["NgramDrafter"]


class NgramDrafter(Drafter):
    """Drafts the tokens that followed an earlier occurrence of the last tokens in the chat.

    Implements Prompt Lookup Decoding (Saxena 2023), with the most recent occurrence of the longest repeated
    n-gram. Every lookup scans the whole chat.

    Args:
        max_ngram_tokens: Maximum number of trailing tokens to look up.
        min_ngram_tokens: Minimum number of matching tokens. Shorter matches are ignored.
    """

    name = "ngram"
    is_lookup = True

    def __init__(self, max_ngram_tokens: int = 4, min_ngram_tokens: int = 2) -> None:
        self._max_ngram_tokens, self._min_ngram_tokens = max_ngram_tokens, min_ngram_tokens
        self._tokens = array("i")

    @property
    def memory_use(self) -> DrafterMemory:
        return DrafterMemory(other_bytes=self._tokens.itemsize * len(self._tokens))

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens = array("i", tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        matched, position = self._longest_repeated_suffix()
        if matched < self._min_ngram_tokens:
            return TokenTree.chain(self._tokens[-1])
        # If fewer than `draft_length` tokens follow the earlier occurrence, repeat them to fill the draft.
        following = self._tokens[position : position + draft_length]
        return TokenTree.chain(self._tokens[-1], [following[i % len(following)] for i in range(draft_length)])

    def _longest_repeated_suffix(self) -> tuple[int, int]:
        """Return the length of the longest suffix that occurs earlier, and where its last occurrence ends."""
        tokens = np.frombuffer(self._tokens, np.int32)
        suffix = self._tokens[-self._max_ngram_tokens :][::-1]
        # Start from all earlier occurrences of the last token, then extend the matches backwards token by
        # token.
        ends = np.flatnonzero(tokens[:-1] == suffix[0]) + 1
        matched = latest = 0
        while len(ends):
            matched, latest = matched + 1, int(ends[-1])
            if matched == len(suffix):
                break
            ends = ends[ends > matched]
            ends = ends[tokens[ends - 1 - matched] == suffix[matched]]
        return matched, latest

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._tokens.extend(tokens)

    def close(self) -> None:
        self._tokens = array("i")
