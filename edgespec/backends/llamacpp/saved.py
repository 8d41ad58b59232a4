"""The memory of a context as bytes and back."""

from __future__ import annotations

import struct

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["from_bytes", "to_bytes"]

_SIZE = struct.Struct("<Q")


def to_bytes(context: LlamaContext, length: int, recurrent: bool) -> bytes:
    """Sequence 0, which holds `length` tokens: each part after its size."""
    parts = [context.state()] if recurrent else context.lift(0, 0, length)
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def from_bytes(context: LlamaContext, data: bytes, length: int, recurrent: bool) -> bool:
    """Put what `to_bytes` gave into an empty context; False when it does not fit."""
    parts = []
    while data:
        if len(data) < _SIZE.size:
            return False
        (size,) = _SIZE.unpack_from(data)
        parts.append(data[_SIZE.size : _SIZE.size + size])
        data = data[_SIZE.size + size :]
    if recurrent:
        return len(parts) == 1 and context.set_state(parts[0])
    return context.put_down(parts, 0, length)
