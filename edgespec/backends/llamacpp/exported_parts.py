"""Encode the parts in which llama.cpp exports a KV cache as one sequence of bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["first_part", "sized_parts", "split_parts"]

_SIZE = struct.Struct("<Q")


def sized_parts(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts, each preceded by its size in bytes. Join the result before you store it."""
    return [piece for part in parts for piece in (_SIZE.pack(len(part)), part)]


def first_part(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return the first part and the bytes that follow it."""
    end = _SIZE.size + int.from_bytes(data[: _SIZE.size], "little")
    return data[_SIZE.size : end], data[end:]


def split_parts(data: memoryview) -> list[memoryview]:
    """Return all parts."""
    parts = []
    while data:
        part, data = first_part(data)
        parts.append(part)
    return parts
