"""Prompt lookup: what followed the last tokens when they stood here before.

Source: Saxena 2023, "Prompt Lookup Decoding", and LLMA (arXiv 2304.04487).
"""

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
    """Looks the last `longest` to `shortest` tokens up in prompt and reply, longest match first.

    Of equal matches the latest wins. Nothing is kept but the tokens, which are scanned each round: that takes
    time in proportion to the text, at numpy's speed.
    """

    name = "ngram"
    is_lookup = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.cost = HostCost()
        self._longest, self._shortest = longest, shortest
        self._text = TokenBuffer()

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(other_bytes=self._text.most_bytes)

    def begin(self, tokens: Sequence[int]) -> None:
        with self.cost:
            self._text.restart(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        with self.cost:
            length, after = self._text.seen(self._longest)
            root = int(self._text.text[self._text.end - 1])
            if length < self._shortest:
                return TokenTree.chain(root)
            return TokenTree.chain(root, self._continued(after, draft_length))

    def _continued(self, at: int, count: int) -> list[int]:
        """`count` tokens from `at` on; past the end they go on with what was just guessed (a loop)."""
        known: list[int] = self._text.text[at : min(at + count, self._text.end)].tolist()
        return [known[i % len(known)] for i in range(count)]

    def commit(self, tokens: tuple[int, ...]) -> None:
        with self.cost:
            self._text.append(tokens)
            self.cost.tokens += len(tokens)

    def note(self) -> str:
        return self.cost.note(self.name)

    def close(self) -> None:
        self._text.restart([])
