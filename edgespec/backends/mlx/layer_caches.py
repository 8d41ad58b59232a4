"""The caches of all layers of a model: KV caches and recurrent states, rolled back together."""

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
    """A state of the caches to go back to. It holds references only, since passes replace recurrent states.

    Attributes:
        length: Tokens in the caches.
        offsets: Offset of each attention cache.
        states: Arrays of each recurrent layer.
    """

    length: int
    offsets: tuple[int, ...]
    states: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class _CachesByKind:
    """The caches of a model, grouped by how they roll back."""

    attention: list[AttentionCache]
    recurrent: list[Any]
    unknown_kinds: set[str]


class LayerCaches:
    """The caches of one model.

    Attributes:
        layers: One cache per layer, as the model's `__call__` takes it in `cache`.
        attention: The KV caches among them.
        recurrent: mlx-lm's caches of recurrent states among them.
        unknown_kinds: Class names of caches with unknown semantics. With any of these, the caches can only
            be cleared as a whole.
        length: Tokens in the caches, including the rows of an open round and of prelaunched passes.
    """

    def __init__(self, model: Any, layout: PassLayout, kv_bits: int | None = None) -> None:
        self._model = model
        self._layout = layout
        self._kv_bits = kv_bits
        self.clear()

    def clear(self) -> None:
        """Replace all caches by empty ones."""
        by_kind = _CachesByKind([], [], set())
        layers = [self._replace(cache, by_kind) for cache in mlx_lm_cache.make_prompt_cache(self._model)]
        # A single assignment, so that an interrupt cannot leave the caches half cleared.
        self.layers, self.attention, self.recurrent, self.unknown_kinds, self.length = (
            layers,
            by_kind.attention,
            by_kind.recurrent,
            by_kind.unknown_kinds,
            0,
        )

    def _replace(self, cache: Any, by_kind: _CachesByKind) -> Any:
        """Return our cache for one of mlx-lm's, and add it to `by_kind`.

        The exact type is compared, because a subclass may have other semantics.
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
        """Whether every layer has one row per token from the first token on."""
        return not (self.recurrent or self.unknown_kinds or self.windowed)

    @property
    def windowed(self) -> bool:
        """Whether some layers have a sliding window."""
        return any(cache.window is not None for cache in self.attention)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of all caches."""
        arrays = [array for cache in self.attention for array in cache.state]
        arrays += [array for cache in self.recurrent for array in cache.cache if array is not None]
        if self.unknown_kinds:
            arrays += [cache.state for cache in self.layers if cache is not None and not cache.empty()]
        return arrays

    @property
    def states(self) -> list[list[mx.array]]:
        """The arrays of each recurrent layer. MLX leaves them unevaluated, as no logits depend on them."""
        return [[array for array in cache.cache if array is not None] for cache in self.recurrent]

    def detach_states(self) -> None:
        """Copy recurrent states that are slices, because a slice keeps its whole parent array in memory."""
        for cache in self.recurrent:
            cache.cache = [array if array is None else mx.contiguous(array) for array in cache.cache]

    @property
    def nbytes(self) -> int:
        """Bytes that the caches occupy now."""
        return sum(cache.nbytes for cache in self.attention) + sum(cache.nbytes for cache in self.recurrent)

    def bytes_by_context(self) -> Callable[[int], int]:
        """Return a function from context tokens to the bytes of the caches when that context is full.

        At least one token must be cached. The function returns 0 for caches of an unknown kind.
        """
        rows = [(cache.bytes_per_token, cache.window) for cache in self.attention]
        fixed = sum(cache.nbytes for cache in self.recurrent)
        # The current recurrent state, and one for each checkpoint.
        fixed *= MAX_CHECKPOINTS + 1
        known = not self.unknown_kinds
        return lambda tokens: (
            known * (fixed + sum(size * cache_rows(window, tokens) for size, window in rows))
        )

    def can_rewind(self, length: int) -> bool:
        """Return whether the tokens from position `length` on can be dropped in place."""
        return (
            not self.recurrent
            and not self.unknown_kinds
            and all(cache.can_rewind(length) for cache in self.attention)
        )

    def rewind(self, length: int) -> None:
        """Drop the attention rows from position `length` on. `restore` rolls recurrent states back."""
        for cache in self.attention:
            cache.rewind(length)
        self.length = length

    def set_offset(self, length: int) -> None:
        """Put the next token at position `length` in every layer, whatever rows lie there."""
        for cache in self.attention:
            cache.offset = length
        self.length = length

    def keep_path(self, round_start: int, path: list[int]) -> None:
        """Keep the accepted path of a round and drop its other rows; see `AttentionCache.keep_path`."""
        for cache in self.attention:
            cache.keep_path(round_start, path)
        self.length = round_start + len(path)

    def checkpoint(self) -> CacheCheckpoint:
        """Return a checkpoint of the caches. No array is copied."""
        return CacheCheckpoint(
            self.length,
            tuple(cache.offset for cache in self.attention),
            tuple(tuple(cache.cache) for cache in self.recurrent),
        )

    def can_restore(self, checkpoint: CacheCheckpoint) -> bool:
        """Return whether the attention layers still hold the rows that the checkpoint needs."""
        return not self.unknown_kinds and all(cache.can_rewind(checkpoint.length) for cache in self.attention)

    def restore(self, checkpoint: CacheCheckpoint) -> None:
        """Roll back to a checkpoint. No token before it may have been dropped since."""
        for cache, state in zip(self.recurrent, checkpoint.states, strict=True):
            cache.cache = list(state)
        for attention, offset in zip(self.attention, checkpoint.offsets, strict=True):
            attention.offset = offset
        self.length = checkpoint.length
