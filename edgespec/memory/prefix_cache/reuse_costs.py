"""The costs of reusing a prefix: the time to prefill it again, against the time to copy its KV state."""

from __future__ import annotations

__all__ = ["ReuseCosts"]

# Reading fewer tokens takes less time than a lookup. Chosen.
_MIN_TOKENS = 16
# Timings of smaller copies are mostly overhead.
_MIN_TIMED_BYTES = 1 << 16
# Assumed until a copy was timed. Memory is rarely slower.
_COPY_BYTES_PER_SECOND = 2e9
# Weight of a new timing in the moving averages. Chosen.
_NEW_WEIGHT = 0.3


class ReuseCosts:
    """Moving averages of the time to prefill a token, and of the time to copy a byte of KV state.

    Args:
        prefill_seconds: assumed seconds per prefill token, until a prefill was timed.
    """

    def __init__(self, prefill_seconds: float) -> None:
        self.prefill_seconds = prefill_seconds
        self._is_measured = False
        self._copy_seconds = 1.0 / _COPY_BYTES_PER_SECOND

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record how long a prefill took. Short ones are left out."""
        if tokens >= _MIN_TOKENS:
            weight = _NEW_WEIGHT if self._is_measured else 1.0
            self.prefill_seconds += weight * (seconds / tokens - self.prefill_seconds)
            self._is_measured = True

    def record_copy(self, size_bytes: int, seconds: float) -> None:
        """Record how long it took to copy KV state. Small copies are left out."""
        if size_bytes >= _MIN_TIMED_BYTES:
            self._copy_seconds += _NEW_WEIGHT * (seconds / size_bytes - self._copy_seconds)

    def saves_time(self, tokens: int, size_bytes: float) -> bool:
        """Return whether prefilling `tokens` takes longer than copying their KV state out and back in."""
        is_worth_it = tokens * self.prefill_seconds > 2.0 * size_bytes * self._copy_seconds
        return tokens >= _MIN_TOKENS and is_worth_it
