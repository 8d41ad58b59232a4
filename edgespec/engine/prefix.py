"""Find common prefixes of token sequences, whose KV cache can be reused."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prefix_length"]


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
