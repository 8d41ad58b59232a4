"""Indexes for looking up token sequences.

A suffix automaton with occurrence counts indexes text that grows during a reply. A suffix array indexes
saved replies and the user's files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from sys import getsizeof
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, MAX_SAMPLED_OCCURRENCES

__all__ = ["SEPARATOR", "SuffixArray", "SuffixAutomaton", "SuffixRange", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.int32]

# Marks the boundary between two texts in an index. Because it is not a token id, no match contains it.
SEPARATOR = -1

# A range of suffix array entries: (first entry, entry after the last).
SuffixRange: TypeAlias = tuple[int, int]

# Store tokens as big-endian integers, so that comparing their bytes compares the tokens.
_TOKEN = np.dtype(">i4")

# A token that follows a match: (number of occurrences, position of the last occurrence, token, automaton
# state after the token). Tuples compare by frequency first, then by recency.
StateContinuation = tuple[int, int, int, int]

# Maximum length, in tokens, of the sequences whose occurrences are counted.
_MAX_COUNTED_TOKENS = MAX_MATCH_TOKENS + MAX_CONTINUATION_TOKENS
# Approximate memory used by one integer in a dict.
_INTEGER_BYTES = 32


class SuffixAutomaton:
    """A suffix automaton for a token sequence (Blumer et al. 1985).

    A state represents all substrings that end at exactly the same positions. Appending a token takes
    amortised constant time. Memory use is about 100 bytes per token for code or prose, and never more than
    350.

    Args:
        min_probability: `continuations` may leave out tokens that are less probable than this.
        capacity_tokens: To bound memory use, the automaton is rebuilt from the last `capacity_tokens` tokens
            whenever the sequence reaches twice this length.
    """

    def __init__(self, min_probability: float = 0.0, capacity_tokens: int = 1 << 15) -> None:
        self._min_probability = min(min_probability, 0.5)
        self._capacity_tokens = capacity_tokens
        self.clear()

    def clear(self) -> None:
        self.tokens = array("i")
        self._dropped_tokens = 0
        self._lengths, self._links = array("i", [0]), array("i", [-1])
        # For each automaton state, the token and the target of its first transition. The target is 0 if there
        # is no transition.
        self._labels, self._targets = array("i", [SEPARATOR]), array("i", [0])
        self._more: dict[int, dict[int, int]] = {}
        # For each automaton state, how often its token sequence occurs, and where the latest occurrence ends.
        self._counts, self._latest = array("i", [0]), array("i", [0])
        self._last = 0
        self._near = self._near_length = 0

    @property
    def size_bytes(self) -> int:
        columns = (self._lengths, self._links, self._labels, self._targets, self._counts, self._latest)
        arrays = sum(map(getsizeof, (self.tokens, *columns)))
        tables = getsizeof(self._more) + sum(map(getsizeof, self._more.values()))
        return arrays + tables + _INTEGER_BYTES * (len(self._more) + sum(map(len, self._more.values())))

    def set_tokens(self, tokens: Sequence[int]) -> int:
        """Replace the token sequence. If `tokens` extends the old sequence, only the new tokens are added.

        Returns:
            The number of tokens added to the automaton.
        """
        end = self._dropped_tokens + len(self.tokens)
        if array("i", tokens[self._dropped_tokens : end]) == self.tokens:
            self.extend(tokens[end:])
            return len(tokens) - end
        self._rebuild(tokens, 0)
        return len(tokens)

    def _rebuild(self, tokens: Sequence[int], dropped: int) -> None:
        self.clear()
        tail = tokens[-self._capacity_tokens :]
        self._dropped_tokens = dropped + len(tokens) - len(tail)
        self.extend(tail)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the indexed sequence. SEPARATOR tokens mark the ends of texts."""
        if len(self.tokens) + len(tokens) > 2 * self._capacity_tokens:
            self._rebuild([*self.tokens, *tokens], self._dropped_tokens)
            return
        lengths, links, more = self._lengths, self._links, self._more
        labels, targets, counts, latest = self._labels, self._targets, self._counts, self._latest
        last, near, near_length = self._last, self._near, self._near_length
        end = len(self.tokens)
        self.tokens.extend(tokens)
        for token in tokens:
            end += 1
            new = len(lengths)
            lengths.append(end)
            links.append(0)
            labels.append(SEPARATOR)
            targets.append(0)
            counts.append(0)
            latest.append(0)
            state, known = last, 0
            while state >= 0:
                if not targets[state]:
                    labels[state], targets[state] = token, new
                elif labels[state] == token:
                    known = targets[state]
                    break
                elif (others := more.get(state)) is None:
                    more[state] = {token: new}
                elif token in others:
                    known = others[token]
                    break
                else:
                    others[token] = new
                state = links[state]
            if known and lengths[known] > lengths[state] + 1:
                clone = new + 1
                lengths.append(lengths[state] + 1)
                for column in (links, labels, targets, counts, latest):
                    column.append(column[known])
                if known in more:
                    more[clone] = more[known].copy()
                links[known] = clone
                if near == known and near_length <= lengths[clone]:
                    near = clone
                while state >= 0:
                    if targets[state] == known:
                        targets[state] = clone
                    elif (others := more.get(state)) is not None and others.get(token) == known:
                        others[token] = clone
                    else:
                        break
                    state = links[state]
                known = clone
            links[new] = known
            last = new
            near = targets[near] if labels[near] == token else more[near][token]
            near_length = min(near_length + 1, _MAX_COUNTED_TOKENS)
            if lengths[links[near]] >= near_length:
                near = links[near]
            state = near
            while state:
                counts[state] += 1
                latest[state] = end
                state = links[state]
        self._last, self._near, self._near_length = last, near, near_length

    def longest_repeated_suffix(self) -> tuple[int, int]:
        """Return the automaton state and length of the sequence's longest suffix that also occurs earlier."""
        state = self._near
        while self._lengths[self._links[state]] >= MAX_MATCH_TOKENS:
            state = self._links[state]
        if self._counts[state] == 1:
            state = self._links[state]
        return state, min(self._lengths[state], MAX_MATCH_TOKENS)

    def suffixes(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the length and the state of each suffix of a matched substring, longest first.

        If several suffixes have the same occurrences, only the longest is yielded.

        Args:
            state: The automaton state of the substring.
            length: The length of the substring, in tokens.
        """
        while state:
            yield length, state
            state = self._links[state]
            length = self._lengths[state]

    def continuations(self, state: int) -> tuple[int, list[StateContinuation]]:
        """Return the tokens that follow the occurrences of a substring, most frequent first.

        Args:
            state: The automaton state of the substring.

        Returns:
            The total count of all continuations, and the tokens with their counts. Rare tokens may be left
            out.
        """
        counts, latest, target, label = self._counts, self._latest, self._targets[state], self._labels[state]
        others = self._more.get(state)
        if others is None:
            if not target or label == SEPARATOR:
                return 0, []
            return counts[target], [(counts[target], latest[target], label, target)]
        total = sum([counts[t] for t in others.values()]) + counts[target]
        if across := self._step(state, SEPARATOR):
            total -= counts[across]
        # Skip rare tokens, because sorting thousands of candidates would be slow.
        enough = total * self._min_probability / 2
        branches = [(counts[t], latest[t], token, t) for token, t in others.items() if counts[t] >= enough]
        branches.append((counts[target], latest[target], label, target))
        branches.sort(reverse=True)
        return total, [branch for branch in branches if branch[2] != SEPARATOR] if across else branches

    def _step(self, state: int, token: int) -> int:
        if self._labels[state] == token:
            return self._targets[state]
        others = self._more.get(state)
        return others.get(token, 0) if others is not None else 0

    def follow(self, match: tuple[int, int], tokens: Sequence[int]) -> tuple[int, int]:
        """Update the longest match between a sequence's end and this automaton after appending `tokens`.

        Args:
            match: The match before `tokens` were appended, or (0, 0) if there was none. Invalid after the
                automaton has grown.
            tokens: The tokens that were appended to the sequence.

        Returns:
            Automaton state and length of the match, which has at most MAX_MATCH_TOKENS tokens.
        """
        state, length = match
        for token in tokens:
            target = self._step(state, token)
            while not target and state:
                state = self._links[state]
                length = self._lengths[state]
                target = self._step(state, token)
            if target:
                state, length = target, min(length + 1, MAX_MATCH_TOKENS)
                if self._lengths[self._links[state]] >= length:
                    state = self._links[state]
        return state, length


class SuffixArray:
    """A suffix array of reversed texts, in which all occurrences of a match are adjacent.

    Each position is sorted by the 32 tokens before it. Sorting uses prefix doubling (Manber and Myers 1990).
    A binary search finds the longest match. The index uses 8 bytes per token.

    Attributes:
        text: All texts, with separators around each, as big-endian int32 [n].
        token_count: Number of tokens, excluding separators.
    """

    def __init__(self, texts: Iterable[TokenArray]) -> None:
        edge = np.full(MAX_MATCH_TOKENS, SEPARATOR, np.int32)
        parts: list[TokenArray] = [edge]
        for text in texts:
            parts += (text, edge[:1])
        whole: TokenArray = np.concatenate([*parts, np.full(MAX_CONTINUATION_TOKENS, SEPARATOR, np.int32)])
        self._order = _sorted_positions(whole)
        self._positions = self._order.data
        # The tokens of all texts in reverse order, as bytes.
        self._reversed = whole[::-1].astype(_TOKEN).tobytes()
        self.text = np.frombuffer(self._reversed, _TOKEN)[::-1]
        self.token_count = int(np.count_nonzero(whole != SEPARATOR))

    @property
    def size_bytes(self) -> int:
        return len(self._reversed) + self._order.nbytes

    def matches(self, last_tokens: Sequence[int]) -> Iterator[tuple[int, SuffixRange]]:
        """Yield each suffix of `last_tokens` that occurs in the texts, longest first.

        Each suffix is given as its length and the range of its occurrences in the suffix array. If several
        suffixes have the same occurrences, only the longest is yielded.
        """
        key = np.array(last_tokens[-MAX_MATCH_TOKENS:][::-1], _TOKEN).tobytes()
        positions, reverse, size, width = self._positions, self._reversed, len(self._positions), len(key)
        end = len(reverse)

        def before(position: int) -> bytes:
            start = end - 4 * position
            return reverse[start : start + width]

        low = high = bisect_left(positions, key, key=before)
        while True:
            left = _shared_tokens(before(positions[low - 1]), key) if low else 0
            right = _shared_tokens(before(positions[high]), key) if high < size else 0
            length = max(left, right)
            if not length:
                return
            prefix = key[: 4 * length]
            if left == length:
                low = self._last_with_prefix(low - 1, -1, prefix)
            if right == length:
                high = self._last_with_prefix(high, 1, prefix) + 1
            yield length, (low, high)

    def _last_with_prefix(self, entry: int, step: int, prefix: bytes) -> int:
        positions, reverse, size = self._positions, self._reversed, len(self._positions)
        end, growing = len(reverse), True
        while step:
            candidate = entry + step
            if 0 <= candidate < size and reverse.startswith(prefix, end - 4 * positions[candidate]):
                entry = candidate
                if growing:
                    step *= 2
                    continue
            growing = False
            step = int(step / 2)
        return entry

    def continuations(self, matches: SuffixRange, count: int) -> list[list[int]]:
        """Return the tokens that follow each occurrence of a match.

        Args:
            matches: Range of occurrences in the suffix array. If there are more than 64, an evenly spaced
                sample is used.
            count: Number of tokens per occurrence, at most MAX_CONTINUATION_TOKENS.

        Returns:
            One row of `count` tokens per occurrence. If a text ends earlier, its row is padded with
            separators.
        """
        low, high = matches
        if high - low == 1:
            position = self._positions[low]
            return [self.text[position : position + count].tolist()]
        positions = self._order[low : high : -(-(high - low) // MAX_SAMPLED_OCCURRENCES), None]
        rows: list[list[int]] = self.text[positions + np.arange(count)].tolist()
        return rows


def _shared_tokens(a: bytes, b: bytes) -> int:
    differing = (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_length()
    return len(b) // 4 - (differing + 31) // 32


def _sorted_positions(text: TokenArray) -> NDArray[np.int32]:
    rank = text.astype(np.int64) + 1
    rank[text == SEPARATOR] = int(rank.max()) + 1
    span = 1
    while span < MAX_MATCH_TOKENS:
        # Prefix doubling (Manber and Myers 1990): each pass doubles the number of tokens that determine the
        # rank.
        earlier = np.zeros_like(rank)
        earlier[span:] = rank[:-span]
        key = rank * (int(rank.max()) + 1) + earlier
        order = np.argsort(key)
        ordered = key[order]
        rank[order] = np.cumsum(np.concatenate(([0], ordered[1:] != ordered[:-1])))
        span *= 2
    has_both = np.flatnonzero((text[:-1] != SEPARATOR) & (text[1:] != SEPARATOR))
    return (has_both[np.argsort(rank[has_both], kind="stable")] + 1).astype(np.int32)
