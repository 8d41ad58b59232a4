"""Serialise the caches of models and heads for snapshots, as a line of JSON followed by the array data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.errors import BackendError
from edgespec.model.base import Snapshot

__all__ = ["deserialize_caches", "deserialize_head", "serialize_caches", "serialize_head"]

# NumPy has no bfloat16, so bfloat16 arrays are stored as 16-bit integers with the same bits.
_STORED_AS = {mx.bfloat16: mx.uint16}
_DTYPES = {
    str(dtype): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint16, mx.uint8, mx.int32, mx.int64)
}


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
                f"the KV cache snapshot starts after {header['start']} tokens, but {caches.length} are cached"
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
    """Append the rows in `data` to the attention caches, and replace the states of the recurrent ones."""
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
    """Return the array stored at byte `offset` in `data`, and its size in bytes."""
    if header is None:
        return None, 0
    dtype = _DTYPES[header["dtype"]]
    kind = np.dtype(str(_STORED_AS.get(dtype, dtype)).removeprefix("mlx.core."))
    count = int(np.prod(header["shape"]))
    values = np.frombuffer(data, kind, count, offset).reshape(header["shape"])
    return mx.array(values).view(dtype), values.nbytes
