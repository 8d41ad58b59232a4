"""What two token sequences share: the part of a cache that need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prefix_length"]


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both sequences begin with."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
