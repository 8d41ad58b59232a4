"""Whether keeping pays: what reading costs against what copying costs, both as they were last measured."""

from __future__ import annotations

__all__ = ["ReuseCosts"]

# Fewer tokens are read sooner than anything is looked up.
_FEW_TOKENS = 16
# Until something was copied: memory is rarely slower.
_COPY_BYTES_PER_SECOND = 2e9
_WEIGHT_OF_NEW = 0.3


class ReuseCosts:
    """Weighs tokens that would be read again against bytes that would be copied twice, away and back.

    read_seconds: what reading a token takes; until some were read, what somebody guesses.
    """

    def __init__(self, read_seconds: float) -> None:
        self.read_seconds = read_seconds
        self._measured = False
        self._copy_seconds = 1.0 / _COPY_BYTES_PER_SECOND

    def note_read(self, tokens: int, seconds: float) -> None:
        """So many tokens were read; a few say little about what many take."""
        if tokens >= _FEW_TOKENS:
            weight = _WEIGHT_OF_NEW if self._measured else 1.0
            self.read_seconds += weight * (seconds / tokens - self.read_seconds)
            self._measured = True

    def note_copied(self, size_bytes: int, seconds: float) -> None:
        """So many bytes were copied."""
        if size_bytes >= 1 << 16:
            self._copy_seconds += _WEIGHT_OF_NEW * (seconds / size_bytes - self._copy_seconds)

    def pays(self, tokens: int, size_bytes: float) -> bool:
        """Whether reading `tokens` again takes longer than copying their bytes away and back."""
        return tokens >= _FEW_TOKENS and tokens * self.read_seconds > 2.0 * size_bytes * self._copy_seconds
