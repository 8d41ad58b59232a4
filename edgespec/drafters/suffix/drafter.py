"""Suffix decoding: what followed the last tokens, in this chat, in earlier replies and in given texts.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.drafters.base import Drafter
from edgespec.drafters.cost import Cost
from edgespec.drafters.suffix.guess import Rule, best_guess, combined
from edgespec.drafters.suffix.index import TextIndex
from edgespec.drafters.text import SEPARATOR, GrowingText
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["Known", "Replies", "SuffixDrafter"]

_RULE = Rule()


class Replies(Protocol):
    """Where replies are kept for later. notice: what went wrong with that; empty when nothing did."""

    notice: str

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a reply."""


@dataclass(frozen=True, slots=True)
class Known:
    """What there is beside the chat.

    index: texts that are known beforehand. replies: told of every reply when the next begins or at the
    end; the replies of this process then help each other as well.
    """

    index: TextIndex | None = None
    replies: Replies | None = None


class SuffixDrafter(Drafter):
    """Grows a tree from every place where the last tokens stood before, and takes the best-scoring one.

    known: asked for once, when the first reply begins. is_end: nothing is guessed after these.
    What is guessed depends on emitted tokens alone, so every node is certain and rejection mode stays exact.
    """

    name = "suffix"
    lookup = True

    def __init__(
        self,
        known: Callable[[], Known] = Known,
        *,
        rule: Rule = _RULE,
        is_end: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.cost = Cost()
        self._rule = rule
        self._is_end = is_end
        self._make_known: Callable[[], Known] | None = known
        self._known = Known()
        self._chat, self._earlier = GrowingText(), GrowingText()
        self._sources: list[GrowingText | TextIndex] = [self._chat]
        self.extra_kv_bytes = self._chat.most_bytes
        self._reply: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._keep_reply()
        if self._make_known is not None:
            self._take(self._make_known())
            self._make_known = None
        with self.cost:
            self._chat.restart(tokens)

    def _take(self, known: Known) -> None:
        self._known = known
        if known.replies is not None:
            self._sources.append(self._earlier)
            self.extra_kv_bytes += self._earlier.most_bytes
        if known.index is not None:
            self._sources.append(known.index)
            self.extra_kv_bytes += known.index.bytes

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        with self.cost:
            recent = self._chat.recent()
            root = int(recent[0])
            guess = combined(
                [
                    best_guess(
                        source.text, source.matches(recent), root, draft_length, self._rule, self._is_end
                    )
                    for source in self._sources
                ],
                self._rule,
            )
        chain = all(parent == node - 1 for node, parent in enumerate(guess.parents))
        return TokenTree(tuple(guess.tokens), tuple(guess.parents), (None,) * len(guess.tokens), block=chain)

    def commit(self, tokens: tuple[int, ...]) -> None:
        with self.cost:
            self._chat.append(tokens)
            self.cost.tokens += len(tokens)
        self._reply.extend(tokens)

    def note(self) -> str:
        index, replies = self._known.index, self._known.replies
        said = self.cost.note(self.name)
        if said and index is not None:
            said = f"{said} and knows {index.tokens:,} tokens of other texts"
        return "; ".join(filter(None, (said, replies.notice if replies else "")))

    def _keep_reply(self) -> None:
        if self._known.replies is not None and self._reply:
            self._earlier.append([*self._reply, SEPARATOR])
            self._known.replies.add(self._reply)
        self._reply = []

    def close(self) -> None:
        self._keep_reply()
        self._known, self._make_known = Known(), None
        self._sources = [self._chat]
        self._chat.restart([])
        self._earlier.restart([])
