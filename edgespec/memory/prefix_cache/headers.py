"""What a file of a kept piece says of itself before its tokens and bytes: checked, whoever wrote it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO
from zlib import crc32

__all__ = ["packed", "read_header", "sums_of"]

VERSION = 1
_MAGIC = b"edgespec kept %d\n" % VERSION
_SIZES = struct.Struct("<II")  # bytes of the header, crc32 of the header
_BLOCK_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 24
_MOST_COUNT = 1 << 62
_TEXTS = ("identity", "name", "after")
_COUNTS = ("start", "end", "data_bytes", "tokens_sum")
_DIGEST = re.compile(r"[0-9a-f]*")


def packed(header: Mapping[str, Any]) -> bytes:
    """What a file begins with."""
    told = json.dumps(header).encode()
    return b"".join((_MAGIC, _SIZES.pack(len(told), crc32(told)), told))


def read_header(file: BinaryIO) -> dict[str, Any]:
    """What a file begins with; it is read up to its tokens. Raises OSError, ValueError."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is of another version")
    sizes = file.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise ValueError("it is cut short")
    size, checksum = _SIZES.unpack(sizes)
    told = file.read(size) if size <= _MOST_HEADER_BYTES else b""
    if len(told) != size or crc32(told) != checksum:
        raise ValueError("it is damaged")
    try:
        header = json.loads(told)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not _is_sound(header):
        raise ValueError("it says nothing that could be")
    return dict(header)


def _is_sound(header: Any) -> bool:
    """Whether a header is one that a `PrefixCacheDisk` could have written."""
    if not isinstance(header, dict) or not all(isinstance(header.get(key), str) for key in _TEXTS):
        return False
    if not all(type(header.get(key)) is int and 0 <= header[key] < _MOST_COUNT for key in _COUNTS):
        return False
    seconds = header.get("seconds")
    return (
        header["start"] <= header["end"]
        and _DIGEST.fullmatch(header["after"]) is not None
        and isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 <= seconds < _MOST_COUNT
        and "sums" in header
    )


def sums_of(payload: bytes) -> list[int]:
    """The crc32 of each block of a payload."""
    view = memoryview(payload)
    return [crc32(view[at : at + _BLOCK_BYTES]) for at in range(0, len(view), _BLOCK_BYTES)]
