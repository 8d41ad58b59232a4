"""A suffix automaton that grows with its text: every substring, how often it stood there, and where last.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from sys import getsizeof

from edgespec.drafters.token_buffer import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, SEPARATOR

__all__ = ["StateContinuation", "SuffixAutomaton", "SuffixMatcher"]

# How often, what decides between equals (the greater first), which token, and the state it leads to.
StateContinuation = tuple[int, int, int, int]

# Occurrences are counted of substrings of up to so many tokens: a match, and what is guessed after it.
_COUNTED = MAX_MATCH_TOKENS + MAX_CONTINUATION_TOKENS
# From so many continuations on, the frequent ones are noted down.
_WIDE = 16
# What a number takes in a dict.
_NUMBER_BYTES = 32


class SuffixAutomaton:
    """The automaton of a text of up to 2 * most_tokens; of a longer one, of its end.

    A state stands for the substrings that occur at the same places, the longest of `lengths[state]` tokens;
    its link leads to the state of the longest of their endings that occurs elsewhere too. A token adds one
    state or two in amortised constant time, and up to _COUNTED steps on links count what ends with it.
    States are rows of flat arrays, and the few with several transitions have a dict: about 100 bytes a token
    of code or prose, 350 at most.

    rarest: continuations that follow a smaller share of the occurrences need not be told.
    """

    def __init__(self, rarest: float = 0.0, most_tokens: int = 1 << 15) -> None:
        self._rarest = min(rarest, 0.5)
        self._most = most_tokens
        self._dropped = 0
        self._clear()

    def _clear(self) -> None:
        self.text = array("i")
        self._lengths, self._links = array("i", [0]), array("i", [-1])
        # The first transition of each state (the root, 0, is nobody's: none yet), and all others.
        self._labels, self._targets = array("i", [SEPARATOR]), array("i", [0])
        self._more: dict[int, dict[int, int]] = {}
        # How many occurrences, and where the last one ends.
        self._counts, self._latest = array("i", [0]), array("i", [0])
        self._last = 0
        # The state of the last _COUNTED tokens, or of all there are.
        self._near = self._near_length = 0
        self._frequent: dict[int, tuple[float, list[int]]] = {}

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        columns = (self._lengths, self._links, self._labels, self._targets, self._counts, self._latest)
        arrays = sum(map(getsizeof, (self.text, *columns)))
        tables = getsizeof(self._more) + sum(map(getsizeof, self._more.values()))
        return arrays + tables + _NUMBER_BYTES * (len(self._more) + sum(map(len, self._more.values())))

    def hold(self, tokens: Sequence[int]) -> int:
        """Be the automaton of `tokens`; how many of them had to be read for it.

        Where they begin with what is known it goes on, else it starts anew.
        """
        end = self._dropped + len(self.text)
        if array("i", tokens[self._dropped : end]) == self.text:
            self.extend(tokens[end:])
            return len(tokens) - end
        self._restart(tokens, 0)
        return len(tokens)

    def _restart(self, tokens: Sequence[int], dropped: int) -> None:
        self._clear()
        kept = tokens[-self._most :]
        self._dropped = dropped + len(tokens) - len(kept)
        self.extend(kept)

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with `tokens`; SEPARATOR is one nothing is guessed across."""
        if len(self.text) + len(tokens) > 2 * self._most:
            self._restart([*self.text, *tokens], self._dropped)
            return
        lengths, links, more = self._lengths, self._links, self._more
        labels, targets, counts, latest = self._labels, self._targets, self._counts, self._latest
        last, near, near_length = self._last, self._near, self._near_length
        end = len(self.text)
        self.text.extend(tokens)
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
                # Its shorter substrings now occur at one place more than the others: they part.
                part = new + 1
                lengths.append(lengths[state] + 1)
                for column in (links, labels, targets, counts, latest):
                    column.append(column[known])
                if known in more:
                    more[part] = more[known].copy()
                links[known] = part
                if near == known and near_length <= lengths[part]:
                    near = part
                while state >= 0:
                    if targets[state] == known:
                        targets[state] = part
                    elif (others := more.get(state)) is not None and others.get(token) == known:
                        others[token] = part
                    else:
                        break
                    state = links[state]
                known = part
            links[new] = known
            last = new
            near = targets[near] if labels[near] == token else more[near][token]
            near_length = min(near_length + 1, _COUNTED)
            if lengths[links[near]] >= near_length:
                near = links[near]
            state = near
            while state:
                counts[state] += 1
                latest[state] = end
                state = links[state]
        self._last, self._near, self._near_length = last, near, near_length

    def repeated(self) -> tuple[int, int]:
        """Return the state and length of the longest suffix that occurred before in the text."""
        state = self._near
        while self._lengths[self._links[state]] >= MAX_MATCH_TOKENS:
            state = self._links[state]
        if self._counts[state] == 1:
            state = self._links[state]
        return state, min(self._lengths[state], MAX_MATCH_TOKENS)

    def matches(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """The endings of a state's substring, each with its length and state, the longest first.

        Of several with the same occurrences only the longest is there.
        """
        while state:
            yield length, state
            state = self._links[state]
            length = self._lengths[state]

    def following(self, state: int) -> tuple[int, list[StateContinuation]]:
        """What follows: how often anything does, and each token, the most frequent first, then the latest.

        Exact for substrings of less than _COUNTED tokens.
        """
        counts, latest, target, label = self._counts, self._latest, self._targets[state], self._labels[state]
        others = self._more.get(state)
        if others is None:
            if not target or label == SEPARATOR:
                return 0, []
            return counts[target], [(counts[target], latest[target], label, target)]
        if len(others) >= _WIDE:
            return self._following_often(state)
        branches = [(counts[t], latest[t], token, t) for token, t in others.items() if token != SEPARATOR]
        if label != SEPARATOR:
            branches.append((counts[target], latest[target], label, target))
        branches.sort(reverse=True)
        return sum([branch[0] for branch in branches]), branches

    def _following_often(self, state: int) -> tuple[int, list[StateContinuation]]:
        """The same for a state with many transitions; those below the rarest share may be missing.

        All are looked at only when the total has grown so much that one left out, had it got all of the
        growth, could have become frequent.
        """
        counts, latest = self._counts, self._latest
        total = counts[state] - (latest[state] == len(self.text))
        if across := self.step(state, SEPARATOR):
            total -= counts[across]
        until, tokens = self._frequent.get(state, (0.0, []))
        if total > until:
            enough = total * self._rarest / 2
            label, others = self._labels[state], self._more[state]
            tokens = [token for token, target in others.items() if counts[target] >= enough]
            if counts[self._targets[state]] >= enough:
                tokens.append(label)
            if across and SEPARATOR in tokens:
                tokens.remove(SEPARATOR)
            self._frequent[state] = (total * (1 - self._rarest / 2) / (1 - self._rarest), tokens)
        branches = []
        for token in tokens:
            target = self.step(state, token)
            branches.append((counts[target], latest[target], token, target))
        branches.sort(reverse=True)
        return total, branches

    def step(self, state: int, token: int) -> int:
        """The state after one more token; 0 where that never stood."""
        if self._labels[state] == token:
            return self._targets[state]
        others = self._more.get(state)
        return others.get(token, 0) if others is not None else 0

    def narrowed(self, state: int, length: int) -> tuple[int, int]:
        """The state of a substring's last MAX_MATCH_TOKENS tokens, where it has one token more."""
        if length > MAX_MATCH_TOKENS:
            length = MAX_MATCH_TOKENS
            if self._lengths[self._links[state]] >= length:
                state = self._links[state]
        return state, length

    def widened(self, state: int) -> tuple[int, int]:
        """The state of the longest ending that occurs elsewhere too, and its length."""
        state = self._links[state]
        return state, self._lengths[state]


class SuffixMatcher:
    """The longest ending of another text that stands in an automaton's, kept up token by token.

    state, length: where in the automaton, and how many tokens of it, MAX_MATCH_TOKENS at most. Both hold
    until the automaton grows.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self.state = self.length = 0

    def restart(self, tokens: Sequence[int]) -> None:
        """Begin anew with the last tokens of a text."""
        self.state = self.length = 0
        self.follow(tokens[-MAX_MATCH_TOKENS:])

    def follow(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        automaton, state, length = self._automaton, self.state, self.length
        for token in tokens:
            target = automaton.step(state, token)
            while not target and state:
                state, length = automaton.widened(state)
                target = automaton.step(state, token)
            if target:
                state, length = automaton.narrowed(target, length + 1)
        self.state, self.length = state, length
