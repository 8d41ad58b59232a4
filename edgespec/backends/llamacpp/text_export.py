"""Export KV cells as bytes for snapshots, and import them again."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from edgespec.backends.llamacpp.kv_sequences import KvSequences

__all__ = ["export_text", "first_part", "import_text", "sized_parts"]

_SIZE = struct.Struct("<Q")


def export_text(context: KvSequences, start: int, end: int, *, recurrent: bool = False) -> bytes:
    """Return a copy of sequence 0 at positions [start, end), or of the whole sequence if it is recurrent."""
    parts = [context.export_sequence()] if recurrent else context.export_cells(0, start, end)
    return b"".join(sized_parts(parts))


def import_text(
    context: KvSequences, data: memoryview, start: int, end: int, *, recurrent: bool = False
) -> bool:
    """Append the result of `export_text` to sequence 0, and return whether it was compatible."""
    parts = []
    while data:
        part, data = first_part(data)
        parts.append(part)
    if recurrent:
        return len(parts) == 1 and context.import_sequence(parts[0])
    return context.import_cells(parts, start, end)


def sized_parts(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of a snapshot, each preceded by its size in bytes. Join the result to store it."""
    return [piece for part in parts for piece in (_SIZE.pack(len(part)), part)]


def first_part(data: memoryview) -> tuple[memoryview, memoryview]:
    """Split off the first part of the joined result of `sized_parts`."""
    end = _SIZE.size + int.from_bytes(data[: _SIZE.size], "little")
    return data[_SIZE.size : end], data[end:]
