"""Suffix decoding (arXiv 2411.04975): draft what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.base import Drafter, DrafterMemory
from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, OTHER_CHATS_TOKENS
from edgespec.methods.suffix import scoring
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixArray, SuffixAutomaton, SuffixRange
from edgespec.methods.suffix.scoring import Continuation, ScoredDraft, SuffixConfig, best_draft, grow_draft

__all__ = ["IndexedSource", "ReplyRecorder", "SuffixCorpus", "SuffixDrafter", "draft_from_automaton"]

_Rows: TypeAlias = tuple[list[list[int]], int]

_DEFAULT_CONFIG = SuffixConfig()
_MAX_CACHED_DRAFTS = 1 << 11


class ReplyRecorder(Protocol):
    """Saves finished replies so that later chats can draft from them.

    Attributes:
        notice: User-facing message about a read or write failure. Empty if there is none.
    """

    notice: str

    def add(self, reply: Sequence[int], prompt: Sequence[int]) -> Sequence[Sequence[int]]:
        """Save a reply and the unsaved parts of its prompt. Return the token sequences that were saved."""


@dataclass(frozen=True, slots=True)
class SuffixCorpus:
    """Texts to draft from in addition to the current chat.

    Attributes:
        index: Index of the user's files and of replies saved by earlier processes. None if there are none.
        recorder: Saves prompts and replies so that other chats can draft from them. None to save nothing.
    """

    index: SuffixArray | None = None
    recorder: ReplyRecorder | None = None


class SuffixDrafter(Drafter):
    """Drafts a tree of the tokens that most often followed earlier occurrences of the last tokens.

    Implements SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The longest match is updated with every
    token, so lookup time depends on the number of matches rather than the length of the chat. When a chat
    continues, only new tokens are indexed. A different prompt is indexed from scratch.

    Args:
        load_corpus: Loads the corpus. Called once, before the first reply.
        config: Limits for drafts.
    """

    name = "suffix"
    is_lookup = True

    def __init__(
        self,
        load_corpus: Callable[[], SuffixCorpus] = SuffixCorpus,
        *,
        config: SuffixConfig = _DEFAULT_CONFIG,
    ) -> None:
        self._config = config
        self._load_corpus: Callable[[], SuffixCorpus] | None = load_corpus
        self._recorder: ReplyRecorder | None = None
        self._indexed: IndexedSource | None = None
        self._chat = SuffixAutomaton(config.min_probability)
        self._other_chats = SuffixAutomaton(config.min_probability, capacity_tokens=OTHER_CHATS_TOKENS)
        # The automaton state and the length in tokens of the longest suffix of the current chat that also
        # occurs in another chat.
        self._other_match = 0, 0
        self._prompt: Sequence[int] = ()
        self._reply: list[int] = []
        # New texts in the current chat, added to `_other_chats` when the user switches to another chat.
        self._chat_texts: list[Sequence[int]] = []

    def warm_up(self) -> None:
        if self._load_corpus is not None:
            corpus, self._load_corpus = self._load_corpus(), None
            self._recorder = corpus.recorder
            self._indexed = IndexedSource(corpus.index, self._config) if corpus.index else None

    def begin(self, tokens: Sequence[int]) -> None:
        self._record_reply()
        self.warm_up()
        self._prompt = tokens
        if self._chat.set_tokens(tokens) == len(tokens):
            for text in self._chat_texts:
                self._other_chats.extend([*text, SEPARATOR])
            self._chat_texts = []
        self._other_match = self._other_chats.follow((0, 0), tokens[-MAX_MATCH_TOKENS:])

    @property
    def memory_use(self) -> DrafterMemory:
        index_bytes = self._indexed.index.size_bytes if self._indexed else 0
        return DrafterMemory(other_bytes=self._chat.size_bytes + self._other_chats.size_bytes + index_bytes)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        drafts = []
        for draft in self._drafts(self._chat.tokens[-1], draft_length):
            drafts.append(draft)
            if draft.score >= draft_length:
                # Stop searching, because this draft will probably be accepted in full.
                break
        tokens, parents, _ = scoring.merge_drafts(drafts, self._config)
        is_chain = parents == list(range(-1, len(parents) - 1))
        return TokenTree(tuple(tokens), tuple(parents), (None,) * len(parents), block_verifiable=is_chain)

    def _drafts(self, root: int, depth: int) -> Iterator[ScoredDraft]:
        """Yield the best drafts from the current chat, from other chats, and from files and saved replies."""
        chat = self._chat
        yield draft_from_automaton(chat, chat.longest_repeated_suffix(), root, depth, self._config)
        yield draft_from_automaton(self._other_chats, self._other_match, root, depth, self._config)
        if self._indexed:
            yield self._indexed.propose(chat.tokens[-MAX_MATCH_TOKENS:], depth)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._chat.extend(tokens)
        self._other_match = self._other_chats.follow(self._other_match, tokens)
        self._reply.extend(tokens)

    def note(self) -> str:
        index = self._indexed.index if self._indexed else None
        indexed = (
            f"searches {index.token_count:,} tokens of files and earlier chats for repeated text"
            if index
            else ""
        )
        return "; ".join(filter(None, (indexed, self._recorder.notice if self._recorder else "")))

    def _record_reply(self) -> None:
        if self._recorder and self._reply:
            self._chat_texts.extend(self._recorder.add(self._reply, self._prompt))
        self._prompt, self._reply = (), []

    def reset(self) -> None:
        self._chat.set_tokens(())

    def close(self) -> None:
        self._record_reply()
        self._load_corpus = self._recorder = self._indexed = None
        self._chat_texts = []
        self._chat.clear()
        self._other_chats.clear()


def draft_from_automaton(
    automaton: SuffixAutomaton, match: tuple[int, int], root: int, depth: int, config: SuffixConfig
) -> ScoredDraft:
    """Return the best draft from the texts in a suffix automaton.

    Args:
        automaton: The automaton to search.
        match: State and length of the longest match with the last tokens of the chat.
        root: Last token of the chat.
        depth: Maximum depth of the draft tree.
        config: Further limits for the draft tree.
    """

    def grow(max_tokens: int, state: int) -> ScoredDraft:
        return grow_draft(automaton.continuations, state, root, depth, max_tokens, config)

    return best_draft(automaton.suffixes(*match), grow, root, depth, config)


class IndexedSource:
    """Drafts from a suffix array over fixed texts, and caches the drafts for frequent contexts."""

    def __init__(self, index: SuffixArray, config: SuffixConfig) -> None:
        self.index, self._config = index, config
        self._cached_grow = lru_cache(_MAX_CACHED_DRAFTS)(self._grow)

    def propose(self, last_tokens: Sequence[int], depth: int) -> ScoredDraft:
        """Return the best draft after `last_tokens`, which are the last tokens of the chat (at most 32)."""
        root = last_tokens[-1]

        def grow(max_tokens: int, matches: SuffixRange) -> ScoredDraft:
            return self._cached_grow(max_tokens, matches, root, depth)

        return best_draft(self.index.matches(last_tokens), grow, root, depth, self._config)

    def _grow(self, max_tokens: int, matches: SuffixRange, root: int, depth: int) -> ScoredDraft:
        rows = self.index.continuations(matches, max(1, min(depth, max_tokens, MAX_CONTINUATION_TOKENS)))
        return grow_draft(_count_rows, (rows, 0), root, depth, max_tokens, self._config)


def _count_rows(place: _Rows) -> tuple[int, list[Continuation[_Rows]]]:
    rows, depth = place
    rows_by_token: dict[int, list[list[int]]] = {}
    for row in rows:
        rows_by_token.setdefault(row[depth], []).append(row)
    rows_by_token.pop(SEPARATOR, None)
    continuations = [
        (len(group), -i, token, (group, depth + 1)) for i, (token, group) in enumerate(rows_by_token.items())
    ]
    continuations.sort(reverse=True)
    return sum([continuation[0] for continuation in continuations]), continuations
