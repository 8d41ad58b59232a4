"""A token buffer that can find repeated n-grams, and constants that the lookup drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_CONTINUATION_TOKENS", "MAX_MATCH_TOKENS", "SEPARATOR", "TokenArray", "TokenBuffer"]

TokenArray: TypeAlias = NDArray[np.int32]

# Separates texts in an index. No token has this id, so matches and continuations never cross a separator.
SEPARATOR = -1
# Maximum length of a match and of a drafted continuation in the suffix drafter, in tokens.
MAX_MATCH_TOKENS = 32
MAX_CONTINUATION_TOKENS = 32


class TokenBuffer:
    """Stores the last tokens of a sequence in 4 bytes each.

    Args:
        capacity_tokens: Number of recent tokens to keep. Older tokens are dropped only when the buffer
            contains twice as many.

    Attributes:
        tokens: int32 array [>= length]; the entries after `length` are unused.
        length: Number of tokens.
    """

    def __init__(self, capacity_tokens: int = 1 << 17) -> None:
        self._capacity_tokens = capacity_tokens
        self.tokens: TokenArray = np.empty(0, np.int32)
        self.length = 0

    @property
    def max_bytes(self) -> int:
        """Maximum size of the buffer in bytes."""
        return 4 * 2 * self._capacity_tokens

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Replace the content of the buffer with the end of `tokens`."""
        self.tokens = np.array(tokens[-self._capacity_tokens :], np.int32)
        self.length = len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""
        length = self.length + len(tokens)
        if length > 2 * self._capacity_tokens:
            self.set_tokens([*self.tokens[: self.length].tolist(), *tokens])
            return
        if length > len(self.tokens):
            larger = np.empty(min(max(1024, 2 * length), 2 * self._capacity_tokens), np.int32)
            larger[: self.length] = self.tokens[: self.length]
            self.tokens = larger
        self.tokens[self.length : length] = tokens
        self.length = length

    def longest_repeated_suffix(self, max_tokens: int) -> tuple[int, int]:
        """Find the longest suffix that also occurs earlier in the buffer, and its latest such occurrence.

        Args:
            max_tokens: Maximum length of the suffix.

        Returns:
            The length of the suffix and the position just after its earlier occurrence, or (0, 0) if there is
            none.
        """
        suffix = self.tokens[max(0, self.length - max_tokens) : self.length][::-1].tolist()
        # Positions after earlier occurrences of the last token. The loop below extends the match to longer
        # suffixes.
        ends = np.flatnonzero(self.tokens[: self.length - 1] == suffix[0]) + 1
        matched = 0
        while len(ends):
            matched, latest = matched + 1, int(ends[-1])
            if matched == len(suffix):
                break
            ends = ends[np.searchsorted(ends, matched, side="right") :]
            ends = ends[self.tokens[ends - 1 - matched] == suffix[matched]]
        return (matched, latest) if matched else (0, 0)
