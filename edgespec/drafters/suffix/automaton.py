"""A suffix automaton with occurrence counts, which indexes texts that grow during a reply."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from sys import getsizeof

from edgespec.drafters.suffix.tokens import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, SEPARATOR

__all__ = ["StateContinuation", "SuffixAutomaton"]

# A continuation of a match: (number of occurrences, position of the last occurrence, token, state after the
# token). In descending order, frequent continuations come first, and recent ones precede old ones.
StateContinuation = tuple[int, int, int, int]

# Maximum length of the substrings whose occurrences are counted: a match and its continuation.
_MAX_COUNTED_TOKENS = MAX_MATCH_TOKENS + MAX_CONTINUATION_TOKENS
# Approximate memory used by one integer in a dict.
_INTEGER_BYTES = 32


class SuffixAutomaton:
    """A suffix automaton for a token sequence (Blumer et al. 1985).

    A state represents all substrings that end at exactly the same positions. `lengths[state]` is the length
    of the longest one. Its suffix link leads to the state of the longest suffix that also occurs elsewhere.
    Appending a token adds one or two states in amortised constant time and follows at most
    `_MAX_COUNTED_TOKENS` links to update the counts. States are stored in flat arrays; only states with
    several transitions have a dict. Memory use is about 100 bytes per token for code or prose, and at most
    350.

    Args:
        min_probability: Tokens that follow a smaller fraction of occurrences may be missing from
            `continuations`.
        capacity_tokens: To limit memory, the automaton is rebuilt from the last `capacity_tokens` tokens
            whenever the sequence reaches twice this length.
    """

    def __init__(self, min_probability: float = 0.0, capacity_tokens: int = 1 << 15) -> None:
        self._min_probability = min(min_probability, 0.5)
        self._capacity_tokens = capacity_tokens
        self.clear()

    def clear(self) -> None:
        """Remove all tokens."""
        self.tokens = array("i")
        self._dropped_tokens = 0
        self._lengths, self._links = array("i", [0]), array("i", [-1])
        # The first transition of each state; `_more` holds the others. No transition leads to the root (state
        # 0), so target 0 means no transition.
        self._labels, self._targets = array("i", [SEPARATOR]), array("i", [0])
        self._more: dict[int, dict[int, int]] = {}
        # For each automaton state, how often its substrings occur in the sequence, and where the latest
        # occurrence ends.
        self._counts, self._latest = array("i", [0]), array("i", [0])
        self._last = 0
        # State and length of the longest suffix of the sequence whose occurrences are counted. It has at most
        # `_MAX_COUNTED_TOKENS` tokens.
        self._near = self._near_length = 0

    @property
    def size_bytes(self) -> int:
        """Memory currently used by the automaton, in bytes."""
        columns = (self._lengths, self._links, self._labels, self._targets, self._counts, self._latest)
        arrays = sum(map(getsizeof, (self.tokens, *columns)))
        tables = getsizeof(self._more) + sum(map(getsizeof, self._more.values()))
        return arrays + tables + _INTEGER_BYTES * (len(self._more) + sum(map(len, self._more.values())))

    def set_tokens(self, tokens: Sequence[int]) -> int:
        """Replace the sequence. If `tokens` begins with the old sequence, only new tokens are added.

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
        """Append `tokens`. Continuations never cross a SEPARATOR."""
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
                # Split the state, because its shorter substrings now occur more often than its longest one.
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
        """Return the state and length of the longest suffix that occurs earlier in the sequence."""
        state = self._near
        while self._lengths[self._links[state]] >= MAX_MATCH_TOKENS:
            state = self._links[state]
        if self._counts[state] == 1:
            state = self._links[state]
        return state, min(self._lengths[state], MAX_MATCH_TOKENS)

    def suffixes(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the length and the state of each suffix of the matched substring, longest first.

        If several suffixes have the same occurrences, only the longest is yielded.
        """
        while state:
            yield length, state
            state = self._links[state]
            length = self._lengths[state]

    def continuations(self, state: int) -> tuple[int, list[StateContinuation]]:
        """Return the tokens that follow a matched substring, most frequent first, after their total count.

        The counts are exact for substrings of fewer than `_MAX_COUNTED_TOKENS` tokens.

        Args:
            state: The automaton state of the substring.
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
        # Sort only the more frequent next tokens, because thousands of different tokens can follow a short
        # match.
        enough = total * self._min_probability / 2
        branches = [(counts[t], latest[t], token, t) for token, t in others.items() if counts[t] >= enough]
        branches.append((counts[target], latest[target], label, target))
        branches.sort(reverse=True)
        return total, [branch for branch in branches if branch[2] != SEPARATOR] if across else branches

    def _step(self, state: int, token: int) -> int:
        """Return the state after appending `token` to a match, or 0 if the longer match does not occur."""
        if self._labels[state] == token:
            return self._targets[state]
        others = self._more.get(state)
        return others.get(token, 0) if others is not None else 0

    def follow(self, match: tuple[int, int], tokens: Sequence[int]) -> tuple[int, int]:
        """Return the longest match with the end of another sequence after appending `tokens` to it.

        `match` is the longest match before `tokens`. A match consists of a state and a length of at most
        MAX_MATCH_TOKENS; (0, 0) if nothing matches. It becomes invalid when this automaton grows.
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
