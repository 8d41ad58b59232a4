"""Suffix decoding: what followed the last tokens, in this chat, in earlier chats and in given texts.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.host_cost import HostCost
from edgespec.drafters.suffix.scoring import ScoredDraft, SuffixConfig, combined
from edgespec.drafters.suffix.sources import ChatSource, DraftSource, IndexedSource, OtherChatsSource
from edgespec.drafters.suffix.suffix_array import SuffixArray
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["ReplyRecorder", "SuffixCorpus", "SuffixDrafter"]

_DEFAULT_CONFIG = SuffixConfig()


class ReplyRecorder(Protocol):
    """Where chats are kept for later. notice: what went wrong with that; empty when nothing did."""

    notice: str

    def add(self, reply: Sequence[int], prompt: Sequence[int]) -> Sequence[Sequence[int]]:
        """Keep a reply, and what its prompt added to all that was kept before: the texts that were new."""


@dataclass(frozen=True, slots=True)
class SuffixCorpus:
    """What there is beside the chat.

    index: texts that are known beforehand. replies: told of every prompt and its reply when the next begins
    or at the end; the chats of this process then help each other as well.
    """

    index: SuffixArray | None = None
    replies: ReplyRecorder | None = None


class SuffixDrafter(Drafter):
    """Grows a tree from every place where the last tokens stood before, and takes the best-scoring one.

    The longest match is kept up with the chat, token by token: a lookup takes time in proportion to what it
    finds, not to how long the chat is. A chat that goes on is not read again; another one is, all of it.

    cost: of the rounds, for each token of a reply. reading: of taking prompts in, for each of their tokens.
    known: asked for once, before the first reply. is_end: nothing is guessed after these.
    What is guessed depends on emitted tokens alone, so every node is certain and rejection mode stays exact.
    """

    name = "suffix"
    is_lookup = True

    def __init__(
        self,
        known: Callable[[], SuffixCorpus] = SuffixCorpus,
        *,
        rule: SuffixConfig = _DEFAULT_CONFIG,
        is_end: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.cost, self.reading = HostCost(), HostCost()
        self._rule = rule
        self._is_end = lru_cache(1 << 14)(is_end)
        self._make_known: Callable[[], SuffixCorpus] | None = known
        self._known = SuffixCorpus()
        self._chat = ChatSource(rule, self._is_end)
        self._others: OtherChatsSource | None = None
        self._sources: list[DraftSource] = [self._chat]
        self._prompt: Sequence[int] = ()
        self._reply: list[int] = []
        # What this chat holds and other chats are to find once it is over.
        self._said: list[Sequence[int]] = []

    def warm_up(self) -> None:
        if self._make_known is not None:
            self._take(self._make_known())
            self._make_known = None

    def begin(self, tokens: Sequence[int]) -> None:
        self._keep_turn()
        self.warm_up()
        self._prompt = tokens
        with self.reading:
            read = self._chat.automaton.hold(tokens)
            if self._others is not None:
                if read == len(tokens):
                    for text in self._said:
                        self._others.add(text)
                    self._said = []
                self._others.begin(self._chat.recent())
        self.reading.tokens += read

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(other_bytes=sum(source.size_bytes for source in self._sources))

    def _take(self, known: SuffixCorpus) -> None:
        self._known = known
        if known.replies is not None:
            self._others = OtherChatsSource(self._rule, self._is_end)
            self._sources.append(self._others)
        if known.index is not None:
            self._sources.append(IndexedSource(known.index, self._rule, self._is_end))

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        with self.cost:
            root = self._chat.automaton.text[-1]
            guesses: list[ScoredDraft] = []
            for source in self._sources:
                guesses.append(source.guess(self._chat, root, draft_length))
                if guesses[-1].score >= draft_length:
                    # Sure of every level: others have nothing to add.
                    break
            guess = combined(guesses, self._rule)
            parents = tuple(guess.parents)
            return TokenTree(
                tuple(guess.tokens),
                parents,
                (None,) * len(parents),
                block_verifiable=parents == tuple(range(-1, len(parents) - 1)),
            )

    def commit(self, tokens: tuple[int, ...]) -> None:
        with self.cost:
            self._chat.automaton.extend(tokens)
            if self._others is not None:
                self._others.follow(tokens)
            self.cost.tokens += len(tokens)
        self._reply.extend(tokens)

    def note(self) -> str:
        index, replies = self._known.index, self._known.replies
        said = self.cost.note(self.name)
        if said and (each := self.reading.microseconds_per_token) is not None:
            said = f"{said} ({each:.0f} µs for one of the prompt)"
        if said and index is not None:
            said = f"{said} and knows {index.tokens:,} tokens of other texts"
        return "; ".join(filter(None, (said, replies.notice if replies else "")))

    def _keep_turn(self) -> None:
        if self._known.replies is not None and self._reply:
            self._said.extend(self._known.replies.add(self._reply, self._prompt))
        self._prompt, self._reply = (), []

    def reset(self) -> None:
        self._chat.automaton.hold(())

    def close(self) -> None:
        self._keep_turn()
        self._known, self._make_known = SuffixCorpus(), None
        self._chat = ChatSource(self._rule, self._is_end)
        self._others, self._sources, self._said = None, [self._chat], []
