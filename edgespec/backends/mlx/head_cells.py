"""The KV caches of MLX heads."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgespec.backends.head_view import HeadCells
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.cache_serialization import deserialize_head, serialize_head
from edgespec.backends.mlx.pass_layout import PassLayout

__all__ = ["BATCH_TOKENS", "MlxHeadCells"]

# Maximum number of tokens per pass. Bounds how long an interrupt waits, because a pass cannot be interrupted.
BATCH_TOKENS = 64


class MlxHeadCells(HeadCells):
    """The KV caches of the networks of a head that MLX runs.

    Args:
        counts: Number of caches of each network.

    Attributes:
        layout: Layout of the next pass.
        caches: The caches of each network.
    """

    length = start = 0

    def __init__(self, counts: Sequence[int]) -> None:
        self.layout, self._counts = PassLayout(), counts
        self.restart(0)

    def restart(self, position: int) -> None:
        self.caches = [[AttentionCache(self.layout) for _ in range(count)] for count in self._counts]
        self.start = self.length = position

    def truncate(self, length: int) -> None:
        self.start, self.length = min(self.start, length), length
        self.rewind(length)

    def rewind(self, length: int) -> None:
        """Remove all rows from position `length` on."""
        for cache in self._flat:
            cache.rewind(length - self.start)

    @property
    def _flat(self) -> list[AttentionCache]:
        return [cache for caches in self.caches for cache in caches]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of all caches."""
        return [array for cache in self._flat for array in cache.state]

    def export(self, start: int, end: int) -> bytes:
        return serialize_head(self._flat, self.start, start, end) if start < end else b""

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        return start == end or deserialize_head(self._flat, self.start, start, data)
