"""What a model remembers: one cache for each layer, ours where we know the kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from edgespec.backends.mlx.attention_cache import AttentionCache, QuantizedAttentionCache, rows_for
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.replay import MAX_CHECKPOINTS

__all__ = ["CacheCheckpoint", "LayerCaches"]


@dataclass(frozen=True, slots=True)
class CacheCheckpoint:
    """The memory at one moment. Recurrent states are never written into, so references keep them.

    offsets: rows of each attention cache. states: the arrays of each recurrent one.
    """

    length: int
    offsets: tuple[int, ...]
    states: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class _CachesByKind:
    """The caches of one set, by kind."""

    attention: list[AttentionCache]
    recurrent: list[Any]
    foreign: set[str]


class LayerCaches:
    """The caches of a model. `layers` is what its `__call__` takes as `cache`.

    length: tokens in the caches, rows of a round and steps run ahead included.
    foreign: names of kinds we do not know; such a memory can only be emptied.
    """

    def __init__(self, model: Any, shape: PassLayout, kv_bits: int | None = None) -> None:
        self._model = model
        self._shape = shape
        self._kv_bits = kv_bits
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        made = _CachesByKind([], [], set())
        layers = [self._ours(cache, made) for cache in mlx_lm_cache.make_prompt_cache(self._model)]
        # All at once: an interrupt must not leave half of it.
        self.layers, self.attention, self.recurrent, self.foreign, self.length = (
            layers,
            made.attention,
            made.recurrent,
            made.foreign,
            0,
        )

    def _ours(self, cache: Any, made: _CachesByKind) -> Any:
        """A cache of our own for one of mlx-lm's. By exact type: a subclass may mean something else."""
        kind = type(cache)
        if kind is mlx_lm_cache.KVCache:
            return self._attention(None, made)
        if kind is mlx_lm_cache.RotatingKVCache and cache.keep == 0:
            return self._attention(cache.max_size, made)
        if kind is mlx_lm_cache.CacheList:
            return mlx_lm_cache.CacheList(*(self._ours(part, made) for part in cache.caches))
        if kind is mlx_lm_cache.ArraysCache:
            made.recurrent.append(cache)
        elif cache is not None:
            made.foreign.add(kind.__name__)
        return cache

    def _attention(self, window: int | None, made: _CachesByKind) -> AttentionCache:
        if self._kv_bits is None:
            cache = AttentionCache(self._shape, window)
        else:
            cache = QuantizedAttentionCache(self._shape, window, self._kv_bits)
        made.attention.append(cache)
        return cache

    @property
    def cuts(self) -> bool:
        """Whether every layer holds a row for each token, from the first on."""
        return not (self.recurrent or self.foreign or self.windowed)

    @property
    def windowed(self) -> bool:
        """Whether some layers look back over a window only."""
        return any(cache.window is not None for cache in self.attention)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array, to be evaluated."""
        states = [array for cache in self.attention for array in cache.state]
        states += [array for cache in self.recurrent for array in cache.cache if array is not None]
        if self.foreign:
            states += [cache.state for cache in self.layers if cache is not None and not cache.empty()]
        return states

    @property
    def states(self) -> list[list[mx.array]]:
        """The recurrent arrays of each layer: logits do not depend on them, so that they stay unevaluated."""
        return [[array for array in cache.cache if array is not None] for cache in self.recurrent]

    def cut_out(self) -> None:
        """Let the recurrent states be arrays of their own: a slice keeps all of what it is a part of."""
        for cache in self.recurrent:
            cache.cache = [array if array is None else mx.contiguous(array) for array in cache.cache]

    @property
    def nbytes(self) -> int:
        """Bytes the caches take now."""
        return sum(cache.nbytes for cache in self.attention) + sum(cache.nbytes for cache in self.recurrent)

    def sizes(self) -> Callable[[int], int]:
        """Bytes of the caches when a context of so many tokens is full; something must be cached now.

        0 where a kind of cache is not known.
        """
        rows = [(cache.bytes_per_token, cache.window) for cache in self.attention]
        fixed = sum(cache.nbytes for cache in self.recurrent)
        # The states now, and those that may be gone back to.
        fixed *= MAX_CHECKPOINTS + 1
        known = not self.foreign
        return lambda tokens: known * (fixed + sum(size * rows_for(window, tokens) for size, window in rows))

    def can_rewind(self, length: int) -> bool:
        """Whether the tokens from `length` on can be taken back in place."""
        return (
            not self.recurrent
            and not self.foreign
            and all(cache.can_rewind(length) for cache in self.attention)
        )

    def rewind(self, length: int) -> None:
        """Take back attention rows from `length` on; what recurs is put back by `restore`."""
        for cache in self.attention:
            cache.rewind(length)
        self.length = length

    def stand(self, length: int) -> None:
        """Let every layer's next row be that of position `length`, whatever rows lie there or are missing."""
        for cache in self.attention:
            cache.offset = length
        self.length = length

    def keep(self, round_start: int, path: list[int]) -> None:
        """Of the round's rows keep those of `path`."""
        for cache in self.attention:
            cache.keep(round_start, path)
        self.length = round_start + len(path)

    def mark(self) -> CacheCheckpoint:
        """The memory now; costs no copy."""
        return CacheCheckpoint(
            self.length,
            tuple(cache.offset for cache in self.attention),
            tuple(tuple(cache.cache) for cache in self.recurrent),
        )

    def reaches(self, mark: CacheCheckpoint) -> bool:
        """Whether the attention layers still hold what they need to go back there."""
        return not self.foreign and all(cache.can_rewind(mark.length) for cache in self.attention)

    def restore(self, mark: CacheCheckpoint) -> None:
        """Make the memory what it was; nothing before that moment may have been taken back since."""
        for cache, state in zip(self.recurrent, mark.states, strict=True):
            cache.cache = list(state)
        for attention, offset in zip(self.attention, mark.offsets, strict=True):
            attention.offset = offset
        self.length = mark.length
