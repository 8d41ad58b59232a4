"""The caches of all layers in a model: KV caches and recurrent states, rolled back together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from edgespec.backends.mlx.attention_cache import AttentionCache, QuantizedAttentionCache, cache_rows
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.replay import MAX_CHECKPOINTS

__all__ = ["CacheCheckpoint", "LayerCaches"]


@dataclass(frozen=True, slots=True)
class CacheCheckpoint:
    """A state that the caches can be rolled back to.

    It stores references instead of copies, because passes never modify recurrent states in place.

    Attributes:
        length: Number of cached tokens.
        offsets: Offset of each attention cache.
        states: Arrays of each recurrent layer.
    """

    length: int
    offsets: tuple[int, ...]
    states: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class _CachesByKind:
    """A model's caches, grouped by how they roll back."""

    attention: list[AttentionCache]
    recurrent: list[Any]
    unknown_kinds: set[str]


class LayerCaches:
    """The caches of one model.

    Attributes:
        layers: One cache per layer, for the `cache` argument of the model's `__call__`.
        attention: The KV caches in `layers`.
        recurrent: mlx-lm's recurrent-state caches in `layers`.
        unknown_kinds: Class names of unsupported caches. If there are any, the caches cannot be rolled back,
            only cleared.
        length: Number of cached tokens, including uncommitted ones.
    """

    def __init__(self, model: Any, layout: PassLayout, kv_bits: int | None = None) -> None:
        self._model = model
        self._layout = layout
        self._kv_bits = kv_bits
        self.clear()

    def clear(self) -> None:
        """Replace all caches with empty ones."""
        by_kind = _CachesByKind([], [], set())
        layers = [self._replace(cache, by_kind) for cache in mlx_lm_cache.make_prompt_cache(self._model)]
        # Assign everything at once, so that an interrupt cannot leave the caches half cleared.
        self.layers, self.attention, self.recurrent, self.unknown_kinds, self.length = (
            layers,
            by_kind.attention,
            by_kind.recurrent,
            by_kind.unknown_kinds,
            0,
        )

    def _replace(self, cache: Any, by_kind: _CachesByKind) -> Any:
        """Return our replacement for an mlx-lm cache, and add it to `by_kind`.

        Types are compared exactly, because a subclass may behave differently.
        """
        kind = type(cache)
        if kind is mlx_lm_cache.KVCache:
            return self._attention_cache(None, by_kind)
        if kind is mlx_lm_cache.RotatingKVCache and cache.keep == 0:
            return self._attention_cache(cache.max_size, by_kind)
        if kind is mlx_lm_cache.CacheList:
            return mlx_lm_cache.CacheList(*(self._replace(part, by_kind) for part in cache.caches))
        if kind is mlx_lm_cache.ArraysCache:
            by_kind.recurrent.append(cache)
        elif cache is not None:
            by_kind.unknown_kinds.add(kind.__name__)
        return cache

    def _attention_cache(self, window: int | None, by_kind: _CachesByKind) -> AttentionCache:
        if self._kv_bits is None:
            cache = AttentionCache(self._layout, window)
        else:
            cache = QuantizedAttentionCache(self._layout, window, self._kv_bits)
        by_kind.attention.append(cache)
        return cache

    @property
    def truncatable(self) -> bool:
        """Whether every layer stores exactly one row for each token."""
        return not (self.recurrent or self.unknown_kinds or self.windowed)

    @property
    def windowed(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(cache.window is not None for cache in self.attention)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays in all caches."""
        arrays = [array for cache in self.attention for array in cache.state]
        arrays += [array for cache in self.recurrent for array in cache.cache if array is not None]
        if self.unknown_kinds:
            arrays += [cache.state for cache in self.layers if cache is not None and not cache.empty()]
        return arrays

    @property
    def states(self) -> list[list[mx.array]]:
        """The arrays of each recurrent layer. Evaluating a pass's logits does not evaluate them."""
        return [[array for array in cache.cache if array is not None] for cache in self.recurrent]

    def detach_states(self) -> None:
        """Copy recurrent states that are slices, because a slice keeps its whole parent array in memory."""
        for cache in self.recurrent:
            cache.cache = [array if array is None else mx.contiguous(array) for array in cache.cache]

    @property
    def nbytes(self) -> int:
        """Current size of the caches in bytes."""
        return sum(cache.nbytes for cache in self.attention) + sum(cache.nbytes for cache in self.recurrent)

    def bytes_by_context(self) -> Callable[[int], int]:
        """Return a function that maps a context length in tokens to the bytes of its full caches.

        At least one token must be cached. The function returns 0 if any cache is of an unknown kind.
        """
        rows = [(cache.bytes_per_token, cache.window) for cache in self.attention]
        fixed = sum(cache.nbytes for cache in self.recurrent)
        # Memory holds the current recurrent state and one state per checkpoint.
        fixed *= MAX_CHECKPOINTS + 1
        known = not self.unknown_kinds
        return lambda tokens: (
            known * (fixed + sum(size * cache_rows(window, tokens) for size, window in rows))
        )

    def can_rewind(self, length: int) -> bool:
        """Return whether the tokens at position `length` and later can be dropped in place."""
        return (
            not self.recurrent
            and not self.unknown_kinds
            and all(cache.can_rewind(length) for cache in self.attention)
        )

    def rewind(self, length: int) -> None:
        """Drop the attention rows at position `length` and later. `restore` rolls back recurrent states."""
        for cache in self.attention:
            cache.rewind(length)
        self.length = length

    def set_offset(self, length: int) -> None:
        """Set the position of the next token to `length` in every layer, without changing any rows."""
        for cache in self.attention:
            cache.offset = length
        self.length = length

    def keep_path(self, round_start: int, path: list[int]) -> None:
        """Keep the accepted path of a tree and drop its other rows; see `AttentionCache.keep_path`."""
        for cache in self.attention:
            cache.keep_path(round_start, path)
        self.length = round_start + len(path)

    def checkpoint(self) -> CacheCheckpoint:
        """Return a checkpoint of the caches. No arrays are copied."""
        return CacheCheckpoint(
            self.length,
            tuple(cache.offset for cache in self.attention),
            tuple(tuple(cache.cache) for cache in self.recurrent),
        )

    def can_restore(self, checkpoint: CacheCheckpoint) -> bool:
        """Return whether the attention layers still hold the rows that the checkpoint needs."""
        return not self.unknown_kinds and all(cache.can_rewind(checkpoint.length) for cache in self.attention)

    def restore(self, checkpoint: CacheCheckpoint) -> None:
        """Roll back to a checkpoint. The caches must still hold all tokens before it."""
        for cache, state in zip(self.recurrent, checkpoint.states, strict=True):
            cache.cache = list(state)
        for attention, offset in zip(self.attention, checkpoint.offsets, strict=True):
            attention.offset = offset
        self.length = checkpoint.length
