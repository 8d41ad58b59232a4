"""Attention with rotary position embeddings and a KV cache, computed with NumPy."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.model.heads.products import Array, Product
from edgespec.model.heads.rotation import Rotation

__all__ = ["CachedAttention", "Projections", "TreeNodes"]

# Minimum number of tokens by which the KV cache grows. Growing copies the cache, so it must be rare.
_MIN_GROWTH_TOKENS = 256


class Projections(NamedTuple):
    """The matrices of an attention layer."""

    q: Product
    k: Product
    v: Product
    o: Product


class TreeNodes(NamedTuple):
    """The position of new tokens in a draft tree.

    Attributes:
        positions: The position of each new token in the sequence, int64 [new tokens].
        visible: Whether each new token attends to each tree token, bool [new tokens, tree tokens]. The tree
            tokens are the last ones in the KV cache, including the new tokens. Tokens before the tree are
            always visible.
    """

    positions: NDArray[np.int64]
    visible: NDArray[np.bool_]


class CachedAttention:
    """The attention of a transformer layer, and its KV cache.

    Args:
        projections: The layer's matrices.
        rotation: The layer's rotary position embedding.
        heads: Number of query heads.
        kv_heads: Number of key-value heads. Several query heads can share one.
        head_size: Size of each head's vectors.

    Attributes:
        start: Position of the first token in the KV cache.
        end: `start` plus the number of tokens in the KV cache. Unless the cache contains a draft tree with
            branches, this is the position after the last token.
    """

    def __init__(
        self, projections: Projections, rotation: Rotation, heads: int, kv_heads: int, head_size: int
    ) -> None:
        self.start = self.end = 0
        self._projections, self._rotation = projections, rotation
        self._heads, self._kv_heads, self._head_size = heads, kv_heads, head_size
        # Keys and values [2, kv heads, tokens, head size].
        self._cache: Array = np.empty((2, kv_heads, 0, head_size), np.float32)

    def with_own_cache(self) -> CachedAttention:
        """Return a copy that shares the weights and has its own, empty KV cache."""
        other = copy(self)
        other.start = other.end = 0
        other._cache = self._cache[:, :, :0].copy()
        return other

    def restart(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`."""
        self.start = self.end = position

    def truncate(self, end: int) -> None:
        """Remove the keys and values from position `end` on."""
        self.end = min(self.end, end)
        self.start = min(self.start, self.end)

    def copy(self, start: int, end: int) -> bytes:
        """Return a copy of the keys and values at positions [start, end), for `restore`."""
        return self._cache[:, :, start - self.start : end - self.start].tobytes()

    def restore(self, tokens: int, data: bytes) -> bool:
        """Append the keys and values of `tokens` tokens. Return False if `data` has the wrong size."""
        shape = (2, self._kv_heads, tokens, self._head_size)
        values = np.frombuffer(data, np.float32) if len(data) % 4 == 0 else np.empty(0, np.float32)
        if values.size != np.prod(shape):
            return False
        used = self.end - self.start
        self._reserve(used + tokens)
        self._cache[:, :, used : used + tokens] = values.reshape(shape)
        self.end += tokens
        return True

    def append(self, x: Array, nodes: TreeNodes | None = None) -> None:
        """Append the keys and values of inputs [tokens, size] to the KV cache.

        Args:
            x: The inputs.
            nodes: The tokens' nodes in a draft tree. None if they follow the last token in the cache.
        """
        used, count = self.end - self.start, len(x)
        self._reserve(used + count)
        keys = self._split(self._projections.k(x))
        self._cache[0, :, used : used + count] = self._rotation(keys, self._positions(count, nodes))
        self._cache[1, :, used : used + count] = self._split(self._projections.v(x))
        self.end += count

    def run(self, x: Array, nodes: TreeNodes | None = None) -> Array:
        """Append inputs to the KV cache as `append` does, and return the output [tokens, size]."""
        count = len(x)
        queries = self._rotation(self._split(self._projections.q(x)), self._positions(count, nodes))
        self.append(x, nodes)
        used = self.end - self.start
        visible = np.tril(np.ones((count, count), bool)) if nodes is None else nodes.visible
        visible = np.hstack([np.ones((count, used - visible.shape[1]), bool), visible])
        keys, values = self._cache[:, :, :used]
        # Stack the queries of all heads that share a key head, so that a single matrix product suffices.
        stacked = queries.reshape(self._kv_heads, -1, self._head_size)
        scores = stacked @ keys.swapaxes(1, 2) / np.float32(np.sqrt(self._head_size))
        scores = np.where(np.tile(visible, (stacked.shape[1] // count, 1)), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        return self._projections.o(mixed.reshape(self._heads, count, -1).swapaxes(0, 1).reshape(count, -1))

    def _positions(self, count: int, nodes: TreeNodes | None) -> NDArray[np.int64]:
        return np.arange(self.end, self.end + count) if nodes is None else nodes.positions

    def _reserve(self, tokens: int) -> None:
        """Make room for the keys and values of `tokens` more tokens."""
        used = self.end - self.start
        if tokens > self._cache.shape[2]:
            grown = max(tokens, used * 3 // 2, used + _MIN_GROWTH_TOKENS)
            cache = np.empty((*self._cache.shape[:2], grown, self._head_size), np.float32)
            cache[:, :, :used] = self._cache[:, :, :used]
            self._cache = cache

    def _split(self, rows: Array) -> Array:
        """Split rows [tokens, heads * head size] into heads, and return [heads, tokens, head size]."""
        return rows.reshape(len(rows), -1, self._head_size).swapaxes(0, 1)
