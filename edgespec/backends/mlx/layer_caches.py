"""Manage the KV caches and recurrent states of all layers of a model as one unit.

For snapshots, the caches of models and heads are serialised as a line of JSON followed by the array data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from edgespec.backends.mlx.attention_cache import AttentionCache, QuantizedAttentionCache, cache_rows
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.errors import BackendError
from edgespec.model.base import Snapshot

__all__ = [
    "CacheCheckpoint",
    "LayerCaches",
    "deserialize_caches",
    "deserialize_head",
    "serialize_caches",
    "serialize_head",
]

# NumPy has no bfloat16, so bfloat16 arrays are stored as 16-bit integers with the same bits.
_STORED_AS = {mx.bfloat16: mx.uint16}
_DTYPES = {
    str(dtype): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint16, mx.uint8, mx.int32, mx.int64)
}


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
        """Return whether `rewind(length)` is possible. Recurrent states require a checkpoint instead."""
        return not self.recurrent and self.can_restore(length)

    def rewind(self, length: int) -> None:
        """Drop the KV cache rows from position `length` onwards, without changing recurrent states."""
        for cache in self.attention:
            cache.rewind(length)
        self.length = length

    def set_offset(self, length: int) -> None:
        """Set the next token's position in every KV cache to `length`, without changing any rows."""
        for cache in self.attention:
            cache.offset = length
        self.length = length

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
    blobs: list[bytes] = []
    parts = _attention_parts(caches.attention, start, end, blobs)
    parts += [
        {"arrays": [_array_header(array, blobs) for array in cache.cache]} for cache in caches.recurrent
    ]
    return _encoded({"model": fingerprint, "start": start, "length": end, "parts": parts}, blobs)


def _attention_parts(
    caches: Sequence[AttentionCache], start: int, end: int, blobs: list[bytes]
) -> list[dict[str, Any]]:
    """Describe rows [start, end) of each cache, and append their data to `blobs`."""
    parts: list[dict[str, Any]] = []
    for cache in caches:
        numbers, arrays = cache.dump(start, end)
        parts.append({"numbers": numbers, "arrays": [_array_header(array, blobs) for array in arrays]})
    return parts


def _array_header(array: mx.array | None, blobs: list[bytes]) -> dict[str, Any] | None:
    """Return the type and shape of an array for the JSON header, and append its data to `blobs`."""
    if array is None:
        return None
    blobs.append(np.array(array.view(_STORED_AS.get(array.dtype, array.dtype))).tobytes())
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def _encoded(header: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    return b"\n".join([json.dumps(header).encode(), b"".join(blobs)])


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
        header, rest = _decoded(snapshot.data)
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
        _load_parts([*caches.attention, *caches.recurrent], header["parts"], rest, start)
        mx.eval(*caches.arrays)
        caches.length = header["length"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        caches.clear()
        raise BackendError(
            f"the KV cache snapshot cannot be restored: {error}",
            "process the prompt again",
            code="state_not_restored",
        ) from error


def serialize_head(caches: Sequence[AttentionCache], origin: int, start: int, end: int) -> bytes:
    """Serialise the rows of a head's caches at positions [start, end).

    Args:
        caches: The head's caches.
        origin: Position of the first row in the caches. Keys are rotated relative to this position.
        start: The first position to serialise.
        end: The position after the last one to serialise.
    """
    blobs: list[bytes] = []
    parts = _attention_parts(caches, start - origin, end - origin, blobs)
    return _encoded({"origin": origin, "parts": parts}, blobs)


def deserialize_head(caches: Sequence[AttentionCache], origin: int, start: int, data: bytes) -> bool:
    """Append rows from `serialize_head` to caches that hold all positions before `start`.

    Returns:
        False if `data` is damaged, or was saved by a different head or with a different `origin`. The
        contents of the caches are then undefined.
    """
    try:
        header, rest = _decoded(data)
        if header["origin"] != origin:
            return False
        _load_parts(caches, header["parts"], rest, start - origin)
        mx.eval(*(array for cache in caches for array in cache.state))
    except (ValueError, KeyError, TypeError, IndexError):
        return False
    return True


def _decoded(data: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, rest = data.partition(b"\n")
    return json.loads(line), rest


def _load_parts(caches: Sequence[Any], parts: Sequence[dict[str, Any]], data: bytes, start: int) -> None:
    """Append the rows in `data` to the attention caches, and replace the recurrent caches' states."""
    offset = 0
    for cache, part in zip(caches, parts, strict=True):
        arrays = []
        for array_header in part["arrays"]:
            array, size = _read_array(array_header, data, offset)
            arrays.append(array)
            offset += size
        if "numbers" in part:
            cache.load(part["numbers"], arrays, start)
        else:
            cache.cache = arrays
    if offset != len(data):
        raise ValueError(f"the KV cache snapshot has {len(data)} bytes of data instead of {offset}")


def _read_array(header: dict[str, Any] | None, data: bytes, offset: int) -> tuple[mx.array | None, int]:
    """Return the array at byte `offset` of `data`, and its size in bytes."""
    if header is None:
        return None, 0
    dtype = _DTYPES[header["dtype"]]
    kind = np.dtype(str(_STORED_AS.get(dtype, dtype)).removeprefix("mlx.core."))
    count = int(np.prod(header["shape"]))
    values = np.frombuffer(data, kind, count, offset).reshape(header["shape"])
    return mx.array(values).view(dtype), values.nbytes
