"""Encode the file headers of cached segments, and read and validate untrusted ones."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO
from zlib import crc32

__all__ = ["block_checksums", "encode_header", "read_header"]

VERSION = 1
_MAGIC = b"edgespec kept %d\n" % VERSION
# Binary format of the header's size in bytes and CRC-32 checksum.
_SIZES = struct.Struct("<II")
_BLOCK_BYTES = 1 << 20
# Maximum size of a header in bytes. edgespec never writes larger headers.
_MAX_HEADER_BYTES = 1 << 24
_MAX_COUNT = 1 << 62
_TEXTS = ("identity", "name", "after")
_COUNTS = ("start", "end", "data_bytes", "tokens_sum")
_DIGEST = re.compile(r"[0-9a-f]*")


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Encode the header of a file in the prefix cache as bytes."""
    encoded = json.dumps(header).encode()
    return b"".join((_MAGIC, _SIZES.pack(len(encoded), crc32(encoded)), encoded))


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read and validate a segment file's header, leaving the file positioned at the tokens.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is damaged, has an unsupported version or contains invalid values.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("the segment file has an unsupported version")
    sizes = file.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise ValueError("the segment file is incomplete")
    size, checksum = _SIZES.unpack(sizes)
    encoded = file.read(size) if size <= _MAX_HEADER_BYTES else b""
    if len(encoded) != size or crc32(encoded) != checksum:
        raise ValueError("the header of the segment file is damaged")
    try:
        header = json.loads(encoded)
    except RecursionError as error:
        raise ValueError("the header of the segment file is nested too deeply") from error
    if not _is_valid(header):
        raise ValueError("the header of the segment file has missing or invalid values")
    return dict(header)


def _is_valid(header: Any) -> bool:
    if not isinstance(header, dict) or not all(isinstance(header.get(key), str) for key in _TEXTS):
        return False
    if not all(type(header.get(key)) is int and 0 <= header[key] < _MAX_COUNT for key in _COUNTS):
        return False
    seconds, heads = header.get("seconds"), header.get("heads", {})
    return (
        isinstance(heads, dict)
        and all(type(size) is int and size >= 0 for size in heads.values())
        and sum(heads.values()) <= header["data_bytes"]
        and header["start"] <= header["end"]
        and _DIGEST.fullmatch(header["after"]) is not None
        and isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 <= seconds < _MAX_COUNT
        and "sums" in header
    )


def block_checksums(data: bytes) -> list[int]:
    """Return the CRC-32 checksum of each 1 MiB block of `data`."""
    view = memoryview(data)
    return [crc32(view[at : at + _BLOCK_BYTES]) for at in range(0, len(view), _BLOCK_BYTES)]
