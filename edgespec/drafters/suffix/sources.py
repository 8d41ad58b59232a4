"""Draft from the current chat, from other chats in this process, and from texts that do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

from edgespec.drafters.suffix.automaton import SuffixAutomaton, SuffixMatcher
from edgespec.drafters.suffix.scoring import Continuation, ScoredDraft, SuffixConfig, best_draft, grow_draft
from edgespec.drafters.suffix.suffix_array import SuffixArray, SuffixRange
from edgespec.drafters.token_buffer import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, SEPARATOR

__all__ = ["ChatSource", "DraftSource", "IndexedSource", "OtherChatsSource"]

# The tokens after each occurrence, and how many of them are already part of the draft's path.
_Rows: TypeAlias = tuple[list[list[int]], int]

# Maximum number of cached drafts per index.
_MAX_CACHED_DRAFTS = 1 << 11
# Number of tokens from other chats to keep. Older tokens are dropped whenever there are twice as many.
_OTHER_CHATS_TOKENS = 1 << 13


class DraftSource(Protocol):
    """Something to draft from, such as a chat or a collection of texts."""

    @property
    def size_bytes(self) -> int:
        """Memory currently used by the index, in bytes."""

    def propose(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        """Return the draft that is most likely to continue the current chat correctly.

        Args:
            chat: The current chat.
            root: Last token of the chat.
            depth: Maximum depth of the draft.
        """


class ChatSource:
    """Drafts from the current chat."""

    def __init__(self, config: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self.automaton = SuffixAutomaton(config.min_probability)
        self._config, self._is_end = config, is_end

    @property
    def size_bytes(self) -> int:
        return self.automaton.size_bytes

    def last_tokens(self) -> Sequence[int]:
        """Return the last tokens of the chat, at most MAX_MATCH_TOKENS."""
        return self.automaton.tokens[-MAX_MATCH_TOKENS:]

    def propose(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        match = self.automaton.longest_repeated_suffix()
        return _draft_from_automaton(self.automaton, match, root, depth, self._config, self._is_end)


class OtherChatsSource:
    """Drafts from recent tokens in other chats of this process."""

    def __init__(self, config: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self.automaton = SuffixAutomaton(config.min_probability, capacity_tokens=_OTHER_CHATS_TOKENS)
        self._matcher = SuffixMatcher(self.automaton)
        self._config, self._is_end = config, is_end

    @property
    def size_bytes(self) -> int:
        return self.automaton.size_bytes

    def add(self, tokens: Sequence[int]) -> None:
        """Add a token sequence. It is used for drafts after the next call to `begin`."""
        self.automaton.extend([*tokens, SEPARATOR])

    def begin(self, last_tokens: Sequence[int]) -> None:
        """Start matching the end of the current chat."""
        self._matcher.restart(last_tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Update the match with tokens that were appended to the chat."""
        self._matcher.extend(tokens)

    def propose(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        match = self._matcher.state, self._matcher.length
        return _draft_from_automaton(self.automaton, match, root, depth, self._config, self._is_end)


def _draft_from_automaton(
    automaton: SuffixAutomaton,
    match: tuple[int, int],
    root: int,
    depth: int,
    config: SuffixConfig,
    is_end: Callable[[int], bool],
) -> ScoredDraft:
    """Return the best draft. `match` is the state and the length of the longest match."""

    def grow(length: int, state: int) -> ScoredDraft:
        max_tokens = config.max_draft_tokens(length)
        return grow_draft(automaton.continuations, state, root, depth, max_tokens, config, is_end)

    return best_draft(automaton.suffixes(*match), grow, root, depth, config)


class IndexedSource:
    """Drafts from texts that do not change. Caches drafts for contexts that occur often."""

    def __init__(self, index: SuffixArray, config: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self._index, self._config, self._is_end = index, config, is_end
        self._cached_grow = lru_cache(_MAX_CACHED_DRAFTS)(self._grow)

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    def propose(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        def grow(length: int, matches: SuffixRange) -> ScoredDraft:
            return self._cached_grow(matches, root, depth, self._config.max_draft_tokens(length))

        return best_draft(self._index.matches(chat.last_tokens()), grow, root, depth, self._config)

    def _grow(self, matches: SuffixRange, root: int, depth: int, max_tokens: int) -> ScoredDraft:
        rows = self._index.continuations(matches, max(1, min(depth, max_tokens, MAX_CONTINUATION_TOKENS)))
        return grow_draft(_count_rows, (rows, 0), root, depth, max_tokens, self._config, self._is_end)


def _count_rows(place: _Rows) -> tuple[int, list[Continuation[_Rows]]]:
    """Count how often each token comes next in the rows. Equally frequent tokens stay in row order."""
    rows, depth = place
    if len(rows) == 1:
        token = rows[0][depth]
        return (0, []) if token == SEPARATOR else (1, [(1, 0, token, (rows, depth + 1))])
    rows_by_token: dict[int, list[list[int]]] = {}
    for row in rows:
        rows_by_token.setdefault(row[depth], []).append(row)
    rows_by_token.pop(SEPARATOR, None)
    continuations = [
        (len(group), -i, token, (group, depth + 1)) for i, (token, group) in enumerate(rows_by_token.items())
    ]
    continuations.sort(reverse=True)
    return sum([continuation[0] for continuation in continuations]), continuations
