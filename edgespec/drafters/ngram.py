"""Prompt lookup decoding: find where the last few tokens occurred before, and draft what followed."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.host_cost import HostCost
from edgespec.drafters.token_buffer import TokenBuffer
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["NgramDrafter"]


class NgramDrafter(Drafter):
    """Drafts the tokens that followed an earlier occurrence of the last tokens in the chat.

    Implements Prompt Lookup Decoding (Saxena 2023). LLMA (arXiv 2304.04487) copies from reference texts in a
    similar way. Longer n-grams are tried first. If an n-gram occurs several times, the most recent occurrence
    is used. There is no index: every lookup scans all tokens, so its time grows with the length of the chat.

    Args:
        max_ngram_tokens: Maximum number of last tokens to look up.
        min_ngram_tokens: Minimum number of matching tokens. Nothing is drafted after a shorter match.
    """

    name = "ngram"
    is_lookup = True

    def __init__(self, max_ngram_tokens: int = 4, min_ngram_tokens: int = 2) -> None:
        self.cost = HostCost()
        self._max_ngram_tokens, self._min_ngram_tokens = max_ngram_tokens, min_ngram_tokens
        self._buffer = TokenBuffer()

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(other_bytes=self._buffer.max_bytes)

    def begin(self, tokens: Sequence[int]) -> None:
        with self.cost:
            self._buffer.set_tokens(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        with self.cost:
            matched, position = self._buffer.longest_repeated_suffix(self._max_ngram_tokens)
            root = int(self._buffer.tokens[self._buffer.length - 1])
            if matched < self._min_ngram_tokens:
                return TokenTree.chain(root)
            return TokenTree.chain(root, self._continuation(position, draft_length))

    def _continuation(self, position: int, count: int) -> list[int]:
        """Return `count` tokens starting at `position`, repeating them if the buffer ends too early."""
        end = min(position + count, self._buffer.length)
        tokens: list[int] = self._buffer.tokens[position:end].tolist()
        return [tokens[i % len(tokens)] for i in range(count)]

    def commit(self, tokens: tuple[int, ...]) -> None:
        with self.cost:
            self._buffer.extend(tokens)
            self.cost.tokens += len(tokens)

    def note(self) -> str:
        return self.cost.note(self.name)

    def close(self) -> None:
        self._buffer.set_tokens([])
