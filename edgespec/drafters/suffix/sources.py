"""Where guesses are looked up: this chat, other chats of this process, and texts that do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

from edgespec.drafters.suffix.automaton import SuffixAutomaton, SuffixMatcher
from edgespec.drafters.suffix.scoring import Continuation, ScoredDraft, SuffixConfig, best_draft, grow
from edgespec.drafters.suffix.suffix_array import SuffixArray, SuffixRange
from edgespec.drafters.token_buffer import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, SEPARATOR

__all__ = ["ChatSource", "DraftSource", "IndexedSource", "OtherChatsSource"]

# Tokens after several occurrences, and how many of them are read.
_Rows: TypeAlias = tuple[list[list[int]], int]

_MOST_KEPT = 1 << 11


class DraftSource(Protocol):
    """Texts that guesses come from."""

    @property
    def size_bytes(self) -> int:
        """What they take in memory."""

    def guess(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        """What followed the last tokens of the chat, of which `root` is the last."""


class ChatSource:
    """The chat itself."""

    def __init__(self, rule: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self.automaton = SuffixAutomaton(rule.min_probability)
        self._rule, self._is_end = rule, is_end

    @property
    def size_bytes(self) -> int:
        return self.automaton.size_bytes

    def recent(self) -> Sequence[int]:
        """The last tokens, up to MAX_MATCH_TOKENS."""
        return self.automaton.text[-MAX_MATCH_TOKENS:]

    def guess(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        return _counted(self.automaton, self.automaton.repeated(), root, depth, self._rule, self._is_end)


class OtherChatsSource:
    """What was said in other chats of this process, lately."""

    def __init__(self, rule: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self.automaton = SuffixAutomaton(rule.min_probability, most_tokens=1 << 13)
        self._follower = SuffixMatcher(self.automaton)
        self._rule, self._is_end = rule, is_end

    @property
    def size_bytes(self) -> int:
        return self.automaton.size_bytes

    def add(self, text: Sequence[int]) -> None:
        """Another text, from the next `begin` on."""
        self.automaton.extend([*text, SEPARATOR])

    def begin(self, recent: Sequence[int]) -> None:
        """A chat goes on after these last tokens."""
        self._follower.restart(recent)

    def follow(self, tokens: Sequence[int]) -> None:
        """The chat goes on."""
        self._follower.follow(tokens)

    def guess(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        match = self._follower.state, self._follower.length
        return _counted(self.automaton, match, root, depth, self._rule, self._is_end)


def _counted(
    automaton: SuffixAutomaton,
    match: tuple[int, int],
    root: int,
    depth: int,
    rule: SuffixConfig,
    is_end: Callable[[int], bool],
) -> ScoredDraft:
    """The best guess of an automaton after its longest match (state, length)."""

    def grown(length: int, state: int) -> ScoredDraft:
        return grow(automaton.following, state, root, depth, rule.nodes(length), rule, is_end)

    return best_draft(automaton.matches(*match), grown, root, depth, rule)


class IndexedSource:
    """Texts that do not change: what is guessed after the most frequent contexts is kept."""

    def __init__(self, index: SuffixArray, rule: SuffixConfig, is_end: Callable[[int], bool]) -> None:
        self._index, self._rule, self._is_end = index, rule, is_end
        self._kept = lru_cache(_MOST_KEPT)(self._grown)

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    def guess(self, chat: ChatSource, root: int, depth: int) -> ScoredDraft:
        def grown(length: int, where: SuffixRange) -> ScoredDraft:
            return self._kept(where, root, depth, self._rule.nodes(length))

        return best_draft(self._index.matches(chat.recent()), grown, root, depth, self._rule)

    def _grown(self, where: SuffixRange, root: int, depth: int, nodes: int) -> ScoredDraft:
        rows = self._index.rows(where, max(1, min(depth, nodes, MAX_CONTINUATION_TOKENS)))
        return grow(_counted_rows, (rows, 0), root, depth, nodes, self._rule, self._is_end)


def _counted_rows(place: _Rows) -> tuple[int, list[Continuation[_Rows]]]:
    """What stands there in these rows: of equally frequent tokens the one found first comes first."""
    rows, at = place
    if len(rows) == 1:
        token = rows[0][at]
        return (0, []) if token == SEPARATOR else (1, [(1, 0, token, (rows, at + 1))])
    there: dict[int, list[list[int]]] = {}
    for row in rows:
        there.setdefault(row[at], []).append(row)
    there.pop(SEPARATOR, None)
    branches = [(len(those), -i, token, (those, at + 1)) for i, (token, those) in enumerate(there.items())]
    branches.sort(reverse=True)
    return sum([branch[0] for branch in branches]), branches
