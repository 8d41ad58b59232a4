"""A suffix automaton with occurrence counts, for indexing text that grows during a reply."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from sys import getsizeof

from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS
from edgespec.methods.suffix.tokens import SEPARATOR

__all__ = ["StateContinuation", "SuffixAutomaton"]

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
        """Update the longest match of a sequence's end in this automaton after `tokens` were appended.

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
