"""The memory of a context as bytes and back."""

from __future__ import annotations

import struct

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["from_bytes", "to_bytes"]

_SIZE = struct.Struct("<Q")


def to_bytes(context: LlamaContext, start: int, end: int, recurrent: bool) -> bytes:
    """Tokens [start, end) of sequence 0: each part after its size.

    A recurrent state is always whole.
    """
    parts = [context.state()] if recurrent else context.lift(0, start, end)
    return b"".join(piece for part in parts for piece in (_SIZE.pack(len(part)), part))


def from_bytes(
    context: LlamaContext, data: bytes | memoryview, start: int, length: int, recurrent: bool
) -> bool:
    """Put what `to_bytes` gave after the `start` tokens of the context; False when it does not fit."""
    parts, rest = [], memoryview(data)
    while rest:
        if len(rest) < _SIZE.size:
            return False
        (size,) = _SIZE.unpack_from(rest)
        parts.append(rest[_SIZE.size : _SIZE.size + size])
        rest = rest[_SIZE.size + size :]
    if recurrent:
        return len(parts) == 1 and context.set_state(parts[0])
    return context.put_down(parts, start, length)
