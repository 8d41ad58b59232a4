"""A memory as bytes and back."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.base import Snapshot
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.errors import BackendError

__all__ = ["from_bytes", "to_bytes"]

# numpy knows no bfloat16: such arrays travel as the integers of the same bits.
_AS_STORED = {mx.bfloat16: mx.uint16}
_DTYPES = {
    str(dtype): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint16, mx.uint8, mx.int32, mx.int64)
}


def to_bytes(memory: LayerCaches, start: int, end: int, fingerprint: str) -> bytes:
    """A line of JSON that tells what is there, then the arrays one after another.

    start, end: the tokens whose rows are wanted; all of them where the memory does not `cut`.
    """
    if memory.foreign:
        raise BackendError(
            f"a memory of {', '.join(sorted(memory.foreign))} cannot be saved", "compute it again"
        )
    parts: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for cache in memory.attention:
        numbers, arrays = cache.dump(start, end)
        parts.append({"numbers": numbers, "arrays": [_described(array, blobs) for array in arrays]})
    parts += [{"arrays": [_described(array, blobs) for array in cache.cache]} for cache in memory.recurrent]
    header = json.dumps({"model": fingerprint, "start": start, "length": end, "parts": parts})
    return b"\n".join([header.encode(), b"".join(blobs)])


def _described(array: mx.array | None, blobs: list[bytes]) -> dict[str, Any] | None:
    if array is None:
        return None
    stored = array.view(_AS_STORED.get(array.dtype, array.dtype))
    blobs.append(np.array(stored).tobytes())
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def from_bytes(memory: LayerCaches, snapshot: Snapshot, fingerprint: str, most_tokens: int) -> None:
    """Put what `to_bytes` gave after the tokens before it, which are all that the memory holds.

    Raises BackendError; the memory is then empty.
    """
    start = snapshot.start
    try:
        line, _, rest = snapshot.data.partition(b"\n")
        header = json.loads(line)
        if header["model"] != fingerprint:
            raise ValueError("it is another model's")
        if header["start"] != start or memory.length != start:
            raise ValueError(f"it goes after {header['start']} tokens, and {memory.length} are there")
        if not start <= header["length"] <= most_tokens:
            raise ValueError(f"it holds {header['length']} tokens, and {most_tokens} fit")
        offset = 0
        for cache, part in zip([*memory.attention, *memory.recurrent], header["parts"], strict=True):
            arrays = []
            for told in part["arrays"]:
                array, size = _array(told, rest, offset)
                arrays.append(array)
                offset += size
            if "numbers" in part:
                cache.load(part["numbers"], arrays, start)
            else:
                cache.cache = arrays
        if offset != len(rest):
            raise ValueError(f"{len(rest)} bytes where {offset} are needed")
        mx.eval(*memory.arrays)
        memory.length = header["length"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        memory.clear()
        raise BackendError(
            f"the saved state does not fit this model and context: {error}", "compute it again"
        ) from error


def _array(told: dict[str, Any] | None, data: bytes, offset: int) -> tuple[mx.array | None, int]:
    if told is None:
        return None, 0
    dtype = _DTYPES[told["dtype"]]
    stored = _AS_STORED.get(dtype, dtype)
    kind = np.dtype(str(stored).removeprefix("mlx.core."))
    count = int(np.prod(told["shape"]))
    values = np.frombuffer(data, kind, count, offset).reshape(told["shape"])
    return mx.array(values).view(dtype), count * kind.itemsize
