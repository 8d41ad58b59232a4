"""Serialise the KV cells of a context for snapshots."""

from __future__ import annotations

import struct

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["snapshot_from_bytes", "snapshot_to_bytes"]

_SIZE = struct.Struct("<Q")


def snapshot_to_bytes(context: LlamaContext, start: int, end: int, recurrent: bool) -> bytes:
    """Serialise the cells of sequence 0 at positions [start, end).

    A recurrent state is always saved as a whole. The result is a sequence of parts, each preceded by its size
    as a little-endian 64-bit integer.
    """
    parts = [context.export_sequence()] if recurrent else context.export_cells(0, start, end)
    return b"".join(piece for part in parts for piece in (_SIZE.pack(len(part)), part))


def snapshot_from_bytes(
    context: LlamaContext, data: bytes | memoryview, start: int, length: int, recurrent: bool
) -> bool:
    """Append a snapshot of positions [start, length) to sequence 0.

    Returns:
        Whether the snapshot was loaded. False if it does not match this model and context.
    """
    parts, rest = [], memoryview(data)
    while rest:
        if len(rest) < _SIZE.size:
            return False
        (size,) = _SIZE.unpack_from(rest)
        parts.append(rest[_SIZE.size : _SIZE.size + size])
        rest = rest[_SIZE.size + size :]
    if recurrent:
        return len(parts) == 1 and context.import_sequence(parts[0])
    return context.import_cells(parts, start, length)
