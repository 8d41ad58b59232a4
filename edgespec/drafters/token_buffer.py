"""Tokens of texts, and a text that grows and is searched as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_CONTINUATION_TOKENS", "MAX_MATCH_TOKENS", "SEPARATOR", "TokenArray", "TokenBuffer"]

TokenArray: TypeAlias = NDArray[np.int32]

# Stands between texts, and around them: no token has it, so nothing matches or goes on across it.
SEPARATOR = -1
# Matches are told apart up to this length, and continuations may be read this far.
MAX_MATCH_TOKENS = 32
MAX_CONTINUATION_TOKENS = 32


class TokenBuffer:
    """A text in 4 bytes a token; of a very long one, the end.

    text: int32 [>= n], the tokens and room for more.
    most_tokens: how many are kept at least, and half of how many at most.
    """

    def __init__(self, most_tokens: int = 1 << 17) -> None:
        self._most = most_tokens
        self.text: TokenArray = np.empty(0, np.int32)
        self.end = 0

    @property
    def most_bytes(self) -> int:
        """What it never exceeds."""
        return 4 * 2 * self._most

    def restart(self, tokens: Sequence[int]) -> None:
        """Forget everything, and hold `tokens`."""
        self.text = np.array(tokens[-self._most :], np.int32)
        self.end = len(self.text)

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with `tokens`."""
        end = self.end + len(tokens)
        if end > 2 * self._most:
            self.restart([*self.text[: self.end].tolist(), *tokens])
            return
        if end > len(self.text):
            larger = np.empty(min(max(1024, 2 * end), 2 * self._most), np.int32)
            larger[: self.end] = self.text[: self.end]
            self.text = larger
        self.text[self.end : end] = tokens
        self.end = end

    def seen(self, longest: int) -> tuple[int, int]:
        """The longest ending, of up to `longest` tokens, that stood here before: its length, what follows it.

        Of equals the latest. 0 when there is none.
        """
        last = self.text[max(0, self.end - longest) : self.end][::-1].tolist()
        # The positions after which the last tokens, one, two and so on, stood.
        found = np.flatnonzero(self.text[: self.end - 1] == last[0]) + 1
        length = 0
        while len(found):
            length, latest = length + 1, int(found[-1])
            if length == len(last):
                break
            found = found[np.searchsorted(found, length, side="right") :]
            found = found[self.text[found - 1 - length] == last[length]]
        return (length, latest) if length else (0, 0)
