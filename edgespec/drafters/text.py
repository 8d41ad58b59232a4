"""Tokens of a text that grows, searched as a whole.

A lookup is one or two vectorised comparisons of the whole text, and work on the few places left; an append
writes its tokens. An index that grows would save the scan and cost far more: a suffix automaton takes steps
of Python for every single token, and a hundred times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DEEPEST",
    "FEW",
    "LONGEST",
    "SAMPLE",
    "SEPARATOR",
    "GrowingText",
    "Match",
    "Tokens",
    "nested_matches",
]

Tokens: TypeAlias = NDArray[np.int32]
Positions: TypeAlias = NDArray[np.int64]

# Stands between texts, and around them: no token has it, so nothing matches or goes on across it.
SEPARATOR = -1
# Matches are told apart up to this length, and continuations may be read this far.
LONGEST = 32
DEEPEST = 64
# How many occurrences of one match are counted.
SAMPLE = 64

# Up to so many occurrences are told apart at once.
FEW = 256


class Match(NamedTuple):
    """Where the last `length` tokens occurred.

    after: the positions that follow the occurrences, at most SAMPLE of them.
    """

    length: int
    after: Positions


class GrowingText:
    """A text in 4 bytes a token; of a very long one, the end.

    text: int32 [>= LONGEST + n + DEEPEST], the tokens with separators around them.
    most_tokens: how many are kept at least, and half of how many at most.
    """

    def __init__(self, most_tokens: int = 1 << 17) -> None:
        self._most = most_tokens
        self.text: Tokens = np.full(LONGEST + DEEPEST, SEPARATOR, np.int32)
        self._end = LONGEST

    @property
    def most_bytes(self) -> int:
        """What it never exceeds."""
        return 4 * (2 * self._most + LONGEST + DEEPEST)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self._end

    def restart(self, tokens: Sequence[int]) -> None:
        """Forget everything, and hold `tokens`."""
        kept = np.array(tokens[-self._most :], np.int32)
        self._end = LONGEST + len(kept)
        self.text = np.full(self._end + DEEPEST, SEPARATOR, np.int32)
        self.text[LONGEST : self._end] = kept

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with `tokens`."""
        known = self._end - LONGEST
        if known + len(tokens) > 2 * self._most:
            kept = self.text[LONGEST : self._end].tolist()
            self.restart([*kept, *tokens])
            return
        end = self._end + len(tokens)
        if end + DEEPEST > len(self.text):
            size = min(max(1024, 2 * known, known + len(tokens)), 2 * self._most)
            larger = np.full(LONGEST + size + DEEPEST, SEPARATOR, np.int32)
            larger[: self._end] = self.text[: self._end]
            self.text = larger
        self.text[self._end : end] = tokens
        self._end = end

    def recent(self, longest: int = LONGEST) -> Tokens:
        """The last tokens, the last one first; fewer where the text or a separator begins."""
        last = self.text[max(LONGEST, self._end - longest) : self._end][::-1]
        stops = np.flatnonzero(last == SEPARATOR)
        return last[: stops[0]] if len(stops) else last

    def matches(self, recent: Tokens) -> list[Match]:
        """Where the beginnings of `recent` (last token first) stand and something follows, shortest first.

        Of several lengths with the same occurrences only the longest is there. Late occurrences come first,
        and are the ones kept where there are too many.
        """
        if not len(recent):
            return []
        # [n]: does the last token stand there, and a successor after it?
        stands = self.text[LONGEST : self._end - 1] == recent[0]
        count = int(np.count_nonzero(stands))
        sets: list[tuple[int, Match]] = []
        length = 1
        if count > FEW:
            places = _latest(stands)
            latest = nested_matches(self.text, recent, [], places)
            if latest[0].length == len(recent):
                # A loop: shorter matches have the same latest occurrences.
                return latest
            sets.append((count, Match(1, places)))
            # A common token: the one before it is compared everywhere too, which leaves few to look up.
            stands &= self.text[LONGEST - 1 : self._end - 2] == recent[1]
            length = 2
        found = np.flatnonzero(stands)[::-1] + LONGEST + 1
        while len(found) > FEW:
            sets.append((len(found), Match(length, found[:SAMPLE])))
            if length == len(recent):
                break
            found = found[self.text[found - 1 - length] == recent[length]]
            length += 1
        return nested_matches(self.text, recent, sets, found)


def _latest(stands: NDArray[np.bool_]) -> Positions:
    """What follows the last SAMPLE true places of a text's tokens, the last first."""
    size = 16 * SAMPLE
    while True:
        begin = max(0, len(stands) - size)
        places = np.flatnonzero(stands[begin:])
        if len(places) >= SAMPLE or not begin:
            return places[-SAMPLE:][::-1] + begin + LONGEST + 1
        size *= 4


def nested_matches(
    text: Tokens, recent: Tokens, sets: list[tuple[int, Match]], found: Positions
) -> list[Match]:
    """All matches: the short ones with how often they occur, then those of the FEW occurrences left."""
    if 0 < len(found) <= FEW:
        # [n, len(recent)]: does the token so far back agree? The separators around a text end every match.
        agrees = text[found[:, None] - 1 - np.arange(len(recent))] == recent
        lengths = np.where(agrees.all(axis=1), len(recent), np.argmin(agrees, axis=1))
        for length in np.unique(lengths).tolist():
            those = found[lengths >= length]
            sets = [*sets, (len(those), Match(length, those[:SAMPLE]))]
    # A longer match with as many occurrences says all that the shorter one does.
    longer = [*(count for count, _ in sets[1:]), 0]
    return [match for (count, match), fewer in zip(sets, longer, strict=False) if fewer < count]
