"""Suffix decoding (arXiv 2411.04975): draft what followed earlier occurrences of the last tokens.

Draft trees are built and scored using counts of observed continuations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.methods.base import Drafter, DrafterMemory
from edgespec.methods.constants import (
    MAX_CONTINUATION_TOKENS,
    MAX_MATCH_TOKENS,
    OTHER_CHATS_TOKENS,
    SUFFIX_LENGTH_FACTOR,
    SUFFIX_MIN_PROBABILITY,
)
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixArray, SuffixAutomaton, SuffixRange

__all__ = [
    "IndexedSource",
    "ScoredDraft",
    "SuffixConfig",
    "SuffixCorpus",
    "SuffixDrafter",
    "draft_from_automaton",
    "grow_draft",
    "merge_drafts",
]

_Rows: TypeAlias = tuple[list[list[int]], int]
# Position of a match in an index. The type depends on the kind of index.
Place = TypeVar("Place")
# A token that follows a match: (number of occurrences, tie-breaker, token, position in the index).
_Continuation: TypeAlias = tuple[int, int, int, Place]
ContinuationLookup: TypeAlias = Callable[[Place], tuple[int, list[_Continuation[Place]]]]

_MAX_CACHED_DRAFTS = 1 << 11


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Limits for suffix drafts. The default sizes match ArcticInference's suffix decoding.

    After a match of m tokens, at most `length_factor * m + length_offset` tokens are drafted.

    Attributes:
        length_factor: Number of drafted tokens per matched token.
        length_offset: Number of additional drafted tokens, regardless of the match length.
        min_probability: Minimum probability that a drafted token and all its ancestors are accepted,
            estimated from counts.
        max_tokens: Maximum number of drafted tokens.
        can_branch: Whether to draft trees. If False, only chains are drafted, for targets that cannot verify
            trees.
        is_end: Returns whether a token ends the reply. A draft never continues past such a token.
    """

    length_factor: float = SUFFIX_LENGTH_FACTOR
    length_offset: float = 0.0
    min_probability: float = SUFFIX_MIN_PROBABILITY
    max_tokens: int = MAX_CONTINUATION_TOKENS
    can_branch: bool = True
    is_end: Callable[[int], bool] = lambda _: False

    def max_draft_tokens(self, match_tokens: int) -> int:
        """Return the maximum number of tokens to draft if `match_tokens` tokens match earlier text."""
        if not match_tokens:
            return 0
        return min(self.max_tokens, int(self.length_factor * match_tokens + self.length_offset))


_DEFAULT_CONFIG = SuffixConfig()


class ReplyRecorder(Protocol):
    """Saves finished replies, so that later chats can draft from them.

    Attributes:
        notice: User-facing message about a read or write failure. Empty if there is none.
    """

    notice: str

    def add(self, reply: Sequence[int], prompt: Sequence[int]) -> Sequence[Sequence[int]]:
        """Save a reply and the unsaved parts of its prompt, and return the saved token sequences."""


@dataclass(frozen=True, slots=True)
class SuffixCorpus:
    """Text to draft from in addition to the current chat.

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
        # The automaton state and the length in tokens of the current chat's longest suffix that also occurs
        # in another chat.
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
        # Copy the tokens, because the caller appends the reply to its list.
        self._prompt = list(tokens)
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
        tokens, parents, _ = merge_drafts(drafts, self._config)
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

    return _best_draft(automaton.suffixes(*match), grow, root, depth, config)


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

        return _best_draft(self.index.matches(last_tokens), grow, root, depth, self._config)

    def _grow(self, max_tokens: int, matches: SuffixRange, root: int, depth: int) -> ScoredDraft:
        rows = self.index.continuations(matches, max(1, min(depth, max_tokens, MAX_CONTINUATION_TOKENS)))
        return grow_draft(_count_rows, (rows, 0), root, depth, max_tokens, self._config)


def _count_rows(place: _Rows) -> tuple[int, list[_Continuation[_Rows]]]:
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


class ScoredDraft(NamedTuple):
    """A draft tree with the estimated acceptance probability of each node. Node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """Expected number of accepted tokens in the draft."""
        return sum(self.probs[1:])


def _best_draft(
    matches: Iterable[tuple[int, Place]],
    grow: Callable[[int, Place], ScoredDraft],
    root: int,
    depth: int,
    config: SuffixConfig,
) -> ScoredDraft:
    """Build a draft tree for each match, and return the tree with the highest score.

    Args:
        matches: The length and the index position of each match with the last tokens, longest first.
        grow: Builds a draft tree, given the maximum number of drafted tokens and an index position.
        root: Last token of the sequence.
        depth: Maximum depth of the draft tree.
        config: Limits for the draft tree.
    """
    best, best_score = ScoredDraft([root], [-1], [1.0]), 0.0
    for length, place in matches:
        draft = grow(config.max_draft_tokens(length), place)
        if (score := draft.score) > best_score:
            best, best_score = draft, score
        # No shorter match can score higher.
        if best_score >= min(depth, config.max_draft_tokens(length - 1)):
            break
    return best


def grow_draft(
    lookup: ContinuationLookup[Place],
    place: Place,
    root: int,
    depth: int,
    max_tokens: int,
    config: SuffixConfig,
) -> ScoredDraft:
    """Build a draft tree from the tokens that most often followed earlier occurrences of the last tokens.

    Args:
        lookup: Returns the tokens that follow a position in the index, with their counts.
        place: The index position after the matched tokens.
        root: Last token of the sequence.
        depth: Maximum depth of the tree.
        max_tokens: Maximum number of drafted tokens.
        config: Further limits.
    """
    depth = min(depth, max_tokens, MAX_CONTINUATION_TOKENS)
    tokens, parents, probs = [root], [-1], [1.0]
    # Heap of candidate nodes: (-path probability, insertion order, parent, token, depth, place).
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    node = level = inserted = 0
    while True:
        if level < depth and not (node and config.is_end(tokens[node])):
            total, continuations = lookup(place)
            for count, _, token, after in continuations if config.can_branch else continuations[:1]:
                probability = probs[node] * count / total
                if probability < config.min_probability:
                    break
                heapq.heappush(frontier, (-probability, inserted, node, token, level + 1, after))
                inserted += 1
        if not frontier or len(tokens) > max_tokens:
            return ScoredDraft(tokens, parents, probs)
        negative, _, parent, token, level, place = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(-negative)


def merge_drafts(drafts: Sequence[ScoredDraft], config: SuffixConfig) -> ScoredDraft:
    """Add likely branches from the other drafts to the draft with the highest score.

    A branch is added only if its estimated probability reaches `config.min_probability`.
    """
    first, *others = sorted(drafts, key=lambda draft: -draft.score)
    others = [other for other in others if len(other.tokens) > 1]
    if not others or not config.can_branch:
        return first
    merged, probs = TreeBuilder(), list(first.probs)
    for parent, token in zip(first.parents, first.tokens, strict=True):
        merged.add(parent, token)
    for other in others:
        unassigned = list(probs)
        for parent, prob in zip(merged.parents[1:], probs[1:], strict=True):
            unassigned[parent] -= prob
        merged_nodes: dict[int, int] = {0: 0}
        for node in range(1, len(other.tokens)):
            parent = merged_nodes.get(other.parents[node], -1)
            if parent < 0:
                continue
            merged_node = merged.child(parent, other.tokens[node])
            if merged_node is None:
                share = other.probs[node] / other.probs[other.parents[node]]
                probability = share * (unassigned[parent] if parent < len(unassigned) else probs[parent])
                if probability < config.min_probability or len(merged) > config.max_tokens:
                    continue
                merged_node = merged.add(parent, other.tokens[node])
                probs.append(probability)
            merged_nodes[node] = merged_node
    return ScoredDraft(merged.tokens, merged.parents, probs)
