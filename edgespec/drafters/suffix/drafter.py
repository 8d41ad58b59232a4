"""Suffix decoding (arXiv 2411.04975): draft what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.host_cost import HostCost
from edgespec.drafters.suffix.scoring import ScoredDraft, SuffixConfig, merge_drafts
from edgespec.drafters.suffix.sources import ChatSource, DraftSource, IndexedSource, OtherChatsSource
from edgespec.drafters.suffix.suffix_array import SuffixArray
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["ReplyRecorder", "SuffixCorpus", "SuffixDrafter"]

_DEFAULT_CONFIG = SuffixConfig()


class ReplyRecorder(Protocol):
    """Saves finished replies so that later chats can draft from them.

    Attributes:
        notice: User-facing message about a read or write failure; empty if there is none.
    """

    notice: str

    def add(self, reply: Sequence[int], prompt: Sequence[int]) -> Sequence[Sequence[int]]:
        """Save a reply and any unsaved parts of its prompt, and return the newly saved token sequences."""


@dataclass(frozen=True, slots=True)
class SuffixCorpus:
    """Texts to draft from in addition to the current chat.

    Attributes:
        index: Index of texts that do not change: the user's files and replies saved by earlier processes.
        recorder: Saves each prompt and reply when the next reply begins or when the drafter is closed. If it
            is set, the chats in this process also draft from each other.
    """

    index: SuffixArray | None = None
    recorder: ReplyRecorder | None = None


class SuffixDrafter(Drafter):
    """Drafts a tree of the tokens that most often followed earlier occurrences of the last tokens.

    Implements SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The longest match is updated with every
    token, so lookup time depends on the number of matches, not on the length of the chat. When a chat
    continues, only new tokens are indexed; a different prompt is indexed completely.

    Drafts depend only on emitted tokens and have no draft probabilities, so rejection sampling stays exact.

    Args:
        load_corpus: Loads the corpus. Called once, before the first reply.
        config: Size limits for drafts.
        is_end: Whether a token ends the reply. Nothing is drafted after such a token.

    Attributes:
        cost: Measures the lookup time per reply token.
        prompt_cost: Measures the indexing time per prompt token.
    """

    name = "suffix"
    is_lookup = True

    def __init__(
        self,
        load_corpus: Callable[[], SuffixCorpus] = SuffixCorpus,
        *,
        config: SuffixConfig = _DEFAULT_CONFIG,
        is_end: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.cost, self.prompt_cost = HostCost(), HostCost()
        self._config = config
        self._is_end = lru_cache(1 << 14)(is_end)
        self._load_corpus: Callable[[], SuffixCorpus] | None = load_corpus
        self._corpus = SuffixCorpus()
        self._chat = ChatSource(config, self._is_end)
        self._other_chats: OtherChatsSource | None = None
        self._sources: list[DraftSource] = [self._chat]
        self._prompt: Sequence[int] = ()
        self._reply: list[int] = []
        # New texts in the current chat. Other chats can draft from them as soon as this chat is left.
        self._chat_texts: list[Sequence[int]] = []

    def warm_up(self) -> None:
        if self._load_corpus is None:
            return
        self._corpus = self._load_corpus()
        self._load_corpus = None
        if self._corpus.recorder is not None:
            self._other_chats = OtherChatsSource(self._config, self._is_end)
            self._sources.append(self._other_chats)
        if self._corpus.index is not None:
            self._sources.append(IndexedSource(self._corpus.index, self._config, self._is_end))

    def begin(self, tokens: Sequence[int]) -> None:
        self._record_reply()
        self.warm_up()
        self._prompt = tokens
        with self.prompt_cost:
            added = self._chat.automaton.set_tokens(tokens)
            if self._other_chats is not None:
                if added == len(tokens):
                    for text in self._chat_texts:
                        self._other_chats.add(text)
                    self._chat_texts = []
                self._other_chats.begin(self._chat.last_tokens())
        self.prompt_cost.tokens += added

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(other_bytes=sum(source.size_bytes for source in self._sources))

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        with self.cost:
            root = self._chat.automaton.tokens[-1]
            drafts: list[ScoredDraft] = []
            for source in self._sources:
                drafts.append(source.propose(self._chat, root, draft_length))
                if drafts[-1].score >= draft_length:
                    # This draft will probably be accepted completely, so do not search the other sources.
                    break
            draft = merge_drafts(drafts, self._config)
            parents = tuple(draft.parents)
            return TokenTree(
                tuple(draft.tokens),
                parents,
                (None,) * len(parents),
                block_verifiable=parents == tuple(range(-1, len(parents) - 1)),
            )

    def commit(self, tokens: tuple[int, ...]) -> None:
        with self.cost:
            self._chat.automaton.extend(tokens)
            if self._other_chats is not None:
                self._other_chats.extend(tokens)
            self.cost.tokens += len(tokens)
        self._reply.extend(tokens)

    def note(self) -> str:
        index, recorder = self._corpus.index, self._corpus.recorder
        cost = self.cost.note(self.name)
        if cost and (prompt_microseconds := self.prompt_cost.microseconds_per_token) is not None:
            cost = f"{cost} ({prompt_microseconds:.0f} µs per prompt token)"
        if cost and index is not None:
            cost = f"{cost}, with {index.token_count:,} indexed tokens of files and earlier chats"
        return "; ".join(filter(None, (cost, recorder.notice if recorder else "")))

    def _record_reply(self) -> None:
        if self._corpus.recorder is not None and self._reply:
            self._chat_texts.extend(self._corpus.recorder.add(self._reply, self._prompt))
        self._prompt, self._reply = (), []

    def reset(self) -> None:
        self._chat.automaton.set_tokens(())

    def close(self) -> None:
        self._record_reply()
        self._corpus, self._load_corpus = SuffixCorpus(), None
        self._chat = ChatSource(self._config, self._is_end)
        self._other_chats, self._sources, self._chat_texts = None, [self._chat], []
