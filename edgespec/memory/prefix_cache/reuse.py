"""Decide how much of a cached prefix can be reused, and whether copying it saves time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.memory.constants import (
    COPY_BYTES_PER_SECOND,
    MIN_CACHED_TOKENS,
    MIN_TIMED_BYTES,
    NEW_REUSE_WEIGHT,
    PREFILL_SPEEDUP,
)
from edgespec.model.image import end_of_images, whole_images
from edgespec.model.model_facts import Capabilities

__all__ = ["ReuseCosts", "reusable_tokens"]


def reusable_tokens(
    capabilities: Capabilities, tokens: Sequence[int] | NDArray[np.int32], length: int
) -> int:
    """Return how many of the first `length` cached tokens can be reused without changing the logits.

    Images are reused as a whole. For some models, the number of tokens after the last of them must be a
    multiple of `capabilities.reuse_block_tokens`, or nothing can be reused.
    """
    length = whole_images(tokens, length)
    if capabilities.prefix_reuse_exact:
        return length
    if not capabilities.partial_truncate:
        return 0
    return length - (length - end_of_images(tokens[:length])) % capabilities.reuse_block_tokens


class ReuseCosts:
    """Moving averages of the prefill time per token and the copy time per byte of KV state.

    Args:
        prefill_seconds: Assumed time per prefill token until `assume_target_step` is called or a prefill has
            been timed. At 0, no copy saves time.
    """

    def __init__(self, prefill_seconds: float = 0.0) -> None:
        self.prefill_seconds = prefill_seconds
        self._is_measured = False
        self._copy_seconds = 1.0 / COPY_BYTES_PER_SECOND

    def assume_target_step(self, seconds: float) -> None:
        """Estimate the prefill time from the duration of a single-token pass, until a prefill is timed."""
        if not self._is_measured:
            self.prefill_seconds = seconds / PREFILL_SPEEDUP

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a prefill of this many tokens. Short prefills are ignored."""
        if tokens >= MIN_CACHED_TOKENS:
            weight = NEW_REUSE_WEIGHT if self._is_measured else 1.0
            self.prefill_seconds += weight * (seconds / tokens - self.prefill_seconds)
            self._is_measured = True

    def record_copy(self, size_bytes: int, seconds: float) -> None:
        """Record the time of copying this many bytes of KV state. Small copies are ignored."""
        if size_bytes >= MIN_TIMED_BYTES:
            self._copy_seconds += NEW_REUSE_WEIGHT * (seconds / size_bytes - self._copy_seconds)

    def saves_time(self, tokens: int, size_bytes: float) -> bool:
        """Return whether prefilling `tokens` takes longer than storing and restoring their KV state."""
        is_worth_it = tokens * self.prefill_seconds > 2.0 * size_bytes * self._copy_seconds
        return tokens >= MIN_CACHED_TOKENS and is_worth_it
