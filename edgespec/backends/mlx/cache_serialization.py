"""Serialise a model's caches for snapshots, as a line of JSON followed by the array data."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.base import Snapshot
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.errors import BackendError

__all__ = ["deserialize_caches", "serialize_caches"]

# NumPy has no bfloat16, so bfloat16 arrays are stored as 16-bit integers with the same bits.
_STORED_AS = {mx.bfloat16: mx.uint16}
_DTYPES = {
    str(dtype): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint16, mx.uint8, mx.int32, mx.int64)
}


def serialize_caches(caches: LayerCaches, start: int, end: int, fingerprint: str) -> bytes:
    """Serialise the cached rows from position `start` to `end` (exclusive).

    Unless the caches are `truncatable`, the range must cover all cached tokens. Only a model with the same
    fingerprint can restore the result.

    Raises:
        BackendError: The model uses an unsupported type of cache.
    """
    if caches.unsupported:
        raise BackendError(
            f"caches of type {caches.unsupported_kinds} cannot be saved", "process the prompt again"
        )
    blobs: list[bytes] = []

    def array_header(array: mx.array | None) -> dict[str, Any] | None:
        if array is None:
            return None
        blobs.append(np.array(array.view(_STORED_AS.get(array.dtype, array.dtype))).tobytes())
        return {"dtype": str(array.dtype), "shape": list(array.shape)}

    parts: list[dict[str, Any]] = []
    for cache in caches.attention:
        numbers, arrays = cache.dump(start, end)
        parts.append({"numbers": numbers, "arrays": [array_header(array) for array in arrays]})
    parts += [{"arrays": [array_header(array) for array in cache.cache]} for cache in caches.recurrent]
    header = json.dumps({"model": fingerprint, "start": start, "length": end, "parts": parts})
    return b"\n".join([header.encode(), b"".join(blobs)])


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
        line, _, rest = snapshot.data.partition(b"\n")
        header = json.loads(line)
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
        offset = 0
        for cache, part in zip([*caches.attention, *caches.recurrent], header["parts"], strict=True):
            arrays = []
            for array_header in part["arrays"]:
                array, size = _read_array(array_header, rest, offset)
                arrays.append(array)
                offset += size
            if "numbers" in part:
                cache.load(part["numbers"], arrays, start)
            else:
                cache.cache = arrays
        if offset != len(rest):
            raise ValueError(f"the KV cache snapshot has {len(rest)} bytes of data instead of {offset}")
        mx.eval(*caches.arrays)
        caches.length = header["length"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        caches.clear()
        raise BackendError(
            f"the KV cache snapshot cannot be restored: {error}", "process the prompt again"
        ) from error


def _read_array(header: dict[str, Any] | None, data: bytes, offset: int) -> tuple[mx.array | None, int]:
    """Return the array stored at byte `offset` in `data`, and its size in bytes."""
    if header is None:
        return None, 0
    dtype = _DTYPES[header["dtype"]]
    kind = np.dtype(str(_STORED_AS.get(dtype, dtype)).removeprefix("mlx.core."))
    count = int(np.prod(header["shape"]))
    values = np.frombuffer(data, kind, count, offset).reshape(header["shape"])
    return mx.array(values).view(dtype), values.nbytes
