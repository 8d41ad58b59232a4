"""Manage the KV caches and recurrent states of all layers of a model as one unit.

For snapshots, the caches of models and heads are serialised as a line of JSON followed by the array data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from edgespec.backends.mlx.attention_cache import (
    AttentionCache,
    PassLayout,
    QuantizedAttentionCache,
    cache_rows,
)
from edgespec.backends.mlx.evaluation import array_bytes, array_header, array_size, read_array
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.errors import BackendError
from edgespec.model.base import Snapshot

__all__ = [
    "CacheCheckpoint",
    "LayerCaches",
    "deserialize_caches",
    "dump_rows",
    "load_rows",
    "read_header",
    "serialize_caches",
]


class CacheCheckpoint(NamedTuple):
    """Saved state of all caches, for rollback.

    Holds references rather than copies, because passes never modify recurrent states in place.

    Attributes:
        length: Number of cached tokens.
        offsets: `AttentionCache.offset` of each attention cache.
        states: State arrays of each recurrent layer.
    """

    length: int
    offsets: tuple[int, ...]
    states: tuple[tuple[Any, ...], ...]


class LayerCaches:
    """The caches of all layers of a model.

    Attributes:
        layers: One cache per layer, passed to the model as its `cache` argument.
        attention: The KV caches among `layers`.
        recurrent: The caches among `layers` that hold recurrent states (mlx-lm's `ArraysCache`).
        unsupported: All other caches. If there are any, `LayerCaches` can only be cleared, not rolled back.
        length: Number of cached tokens, including uncommitted ones.
    """

    def __init__(self, model: Any, layout: PassLayout, kv_bits: int | None = None) -> None:
        self._model = model
        self._layout = layout
        self._kv_bits = kv_bits
        self.clear()

    def clear(self) -> None:
        """Replace all caches with new, empty ones."""
        attention: list[AttentionCache] = []
        recurrent: list[Any] = []
        unsupported: list[Any] = []

        def replace(cache: Any) -> Any:
            kind = type(cache)
            if kind is mlx_lm_cache.CacheList:
                return mlx_lm_cache.CacheList(*map(replace, cache.caches))
            if kind is mlx_lm_cache.KVCache:
                attention.append(self._attention_cache(None))
                return attention[-1]
            if kind is mlx_lm_cache.RotatingKVCache and cache.keep == 0:
                attention.append(self._attention_cache(cache.max_size))
                return attention[-1]
            if cache is not None:
                (recurrent if kind is mlx_lm_cache.ArraysCache else unsupported).append(cache)
            return cache

        layers = [replace(cache) for cache in mlx_lm_cache.make_prompt_cache(self._model)]
        # Assign all fields in one statement, so that an interrupt cannot leave the caches half cleared.
        state = (layers, attention, recurrent, unsupported, 0)
        self.layers, self.attention, self.recurrent, self.unsupported, self.length = state

    def _attention_cache(self, window: int | None) -> AttentionCache:
        if self._kv_bits is None:
            return AttentionCache(self._layout, window)
        return QuantizedAttentionCache(self._layout, window, self._kv_bits)

    @property
    def unsupported_kinds(self) -> str:
        return ", ".join(sorted({type(cache).__name__ for cache in self.unsupported}))

    @property
    def truncatable(self) -> bool:
        """Whether the caches can be truncated to any length, because every layer stores one row per token."""
        return not (self.recurrent or self.unsupported or self.windowed)

    @property
    def windowed(self) -> bool:
        return any(cache.window is not None for cache in self.attention)

    @property
    def states(self) -> list[list[mx.array]]:
        return [[array for array in cache.cache if array is not None] for cache in self.recurrent]

    @property
    def arrays(self) -> list[mx.array]:
        arrays = [array for cache in self.attention for array in cache.state]
        arrays += [array for state in self.states for array in state]
        return arrays + [cache.state for cache in self.unsupported if not cache.empty()]

    def detach_states(self) -> None:
        """Copy recurrent states that are slices of larger arrays, so that MLX can free these arrays."""
        for cache in self.recurrent:
            cache.cache = [array if array is None else mx.contiguous(array) for array in cache.cache]

    def bytes_by_context(self) -> Callable[[int], int]:
        """Return a function that maps a context length in tokens to the size of all caches in bytes.

        The size per token is measured, so at least one token must be cached.
        """
        if self.unsupported:
            return lambda _tokens: 0
        rows = [(cache.bytes_per_token, cache.window) for cache in self.attention]
        # Each checkpoint keeps another copy of the recurrent states in memory.
        fixed = (MAX_CHECKPOINTS + 1) * sum(cache.nbytes for cache in self.recurrent)
        return lambda tokens: fixed + sum(size * cache_rows(window, tokens) for size, window in rows)

    def can_restore(self, length: int) -> bool:
        """Return whether the KV caches still hold all rows needed to roll back to `length` tokens."""
        return not self.unsupported and all(cache.can_rewind(length) for cache in self.attention)

    def can_rewind(self, length: int) -> bool:
        """Return whether `set_offset(length)` rolls back. Recurrent states require a checkpoint instead."""
        return not self.recurrent and self.can_restore(length)

    def set_offset(self, length: int) -> None:
        """Set the next token's position in every KV cache to `length`.

        This drops the rows from position `length` onwards, but does not change recurrent states.
        """
        for cache in self.attention:
            cache.offset = length
        self.length = length

    def repeat(self, end: int) -> None:
        """Append copies of the rows in every KV cache until it holds `end` tokens. See `truncatable`."""
        for cache in self.attention:
            cache.repeat(end)
        self.length = max(self.length, end)

    def keep_path(self, round_start: int, path: list[int]) -> None:
        """Keep the cached rows of a token tree's accepted path, and drop those of its other nodes."""
        for cache in self.attention:
            cache.keep_path(round_start, path)
        self.length = round_start + len(path)

    def checkpoint(self) -> CacheCheckpoint:
        """Save the current state of the caches, without copying any arrays."""
        return CacheCheckpoint(
            self.length,
            tuple(cache.offset for cache in self.attention),
            tuple(tuple(cache.cache) for cache in self.recurrent),
        )

    def restore(self, checkpoint: CacheCheckpoint) -> None:
        """Restore a checkpoint. The caches must still hold all tokens before it."""
        for cache, state in zip(self.recurrent, checkpoint.states, strict=True):
            cache.cache = list(state)
        for attention, offset in zip(self.attention, checkpoint.offsets, strict=True):
            attention.offset = offset
        self.length = checkpoint.length


def serialize_caches(caches: LayerCaches, start: int, end: int, fingerprint: str) -> bytes:
    """Serialise the cached rows at positions [start, end).

    Unless the caches are `truncatable`, the range must cover all cached tokens. Only a model with the same
    fingerprint can restore the result.

    Raises:
        BackendError: The model uses an unsupported type of cache.
    """
    if caches.unsupported:
        raise BackendError(
            f"caches of type {caches.unsupported_kinds} cannot be saved",
            "process the prompt again",
            code="state_not_restored",
        )
    header = {"model": fingerprint, "start": start, "length": end}
    return dump_rows([*caches.attention, *caches.recurrent], header, start, end)


def deserialize_caches(
    caches: LayerCaches, snapshot: Snapshot, fingerprint: str, context_tokens: int
) -> None:
    """Append the keys, values and states in a snapshot to the model's caches.

    The snapshot must come from `serialize_caches`, and the caches must hold exactly the `snapshot.start`
    tokens that precede it.

    Raises:
        BackendError: The snapshot is damaged, was saved by another model, or exceeds the context. The caches
            are cleared before the error is raised.
    """
    start = snapshot.start
    try:
        header, rows = read_header(snapshot.data)
        if header["model"] != fingerprint:
            raise ValueError("the KV cache snapshot was saved by another model")
        if header["start"] != start or caches.length != start:
            raise ValueError(
                f"the KV cache snapshot starts after {header['start']} tokens, but {caches.length} tokens"
                " are cached"
            )
        if not start <= header["length"] <= context_tokens:
            raise ValueError(
                f"the KV cache snapshot has {header['length']} tokens, but the context is limited to"
                f" {context_tokens}"
            )
        load_rows([*caches.attention, *caches.recurrent], header, rows, start)
        mx.eval(*caches.arrays)
        caches.length = header["length"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        caches.clear()
        raise BackendError(
            f"the KV cache snapshot cannot be restored: {error}",
            "process the prompt again",
            code="state_not_restored",
        ) from error


def dump_rows(caches: Sequence[Any], header: dict[str, Any], start: int, end: int) -> bytes:
    """Serialise a header, the rows [start, end) of attention caches, and the states of recurrent caches."""
    parts: list[dict[str, Any]] = []
    blobs: list[memoryview] = []
    for cache in caches:
        part: dict[str, Any] = {}
        arrays: Sequence[mx.array | None]
        if isinstance(cache, AttentionCache):
            part["numbers"], arrays = cache.dump(start, end)
        else:
            arrays = cache.cache
        part["arrays"] = [None if array is None else array_header(array) for array in arrays]
        parts.append(part)
        blobs += [array_bytes(array) for array in arrays if array is not None]
    return b"\n".join([json.dumps({**header, "parts": parts}).encode(), b"".join(blobs)])


def read_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the rows that `dump_rows` serialised. Raises ValueError if it is damaged."""
    line, _, rows = data.partition(b"\n")
    return json.loads(line), rows


def load_rows(caches: Sequence[Any], header: dict[str, Any], rows: bytes, start: int) -> None:
    """Append rows from `read_header` to the attention caches, and replace the recurrent caches' states.

    Raises:
        ValueError, KeyError, TypeError, IndexError: The rows are damaged.
    """
    offset = 0
    for cache, part in zip(caches, header["parts"], strict=True):
        arrays: list[Any] = []
        for described in part["arrays"]:
            if described is None:
                arrays.append(None)
                continue
            size = array_size(described)
            arrays.append(read_array(described, rows[offset : offset + size]))
            offset += size
        if "numbers" in part:
            cache.load(part["numbers"], arrays, start)
        else:
            cache.cache = arrays
    if offset != len(rows):
        raise ValueError(f"the KV cache snapshot has {len(rows)} bytes of data instead of {offset}")
