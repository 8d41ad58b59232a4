"""Prefix cache files with forged headers are ignored without an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from edgespec.memory.prefix_cache.disk import _MAGIC, _SIZES, PrefixCacheDisk, read_header
from edgespec.memory.prefix_cache.segments import name_of, tokens_digest
from edgespec.model.base import Snapshot

TEXT = np.arange(50, dtype=np.int32)
KEYS = ("identity", "name", "after", "start", "end", "data_bytes", "seconds", "tokens_sum", "sums")


def written(disk: PrefixCacheDisk, start: int, end: int) -> bool:
    snapshot = Snapshot(end, b"x" * 300, start)
    return disk.write(name_of(TEXT[:end], start), tokens_digest(TEXT[:start]), TEXT[start:end], snapshot, 1.0)


def forge(path: Path, header: bytes) -> None:
    """Replace the header of a file, with a valid checksum."""
    with path.open("rb") as file:
        read_header(file)
        rest = file.read()
    sizes = _SIZES.pack(len(header), crc32(header))
    path.write_bytes(_MAGIC + sizes + header + rest)


@pytest.mark.parametrize("quota_bytes", [1 << 30, 1500])
@pytest.mark.parametrize("key", KEYS)
def test_files_with_an_invalid_header_are_ignored(tmp_path: Path, key: str, quota_bytes: int) -> None:
    name = name_of(TEXT[:40], 0)
    values: tuple[Any, ...] = ("missing", None, "../x", "/x", -1, 1e400, 10**30, [], {}, True)
    for value in values:
        disk = PrefixCacheDisk("a model", quota_bytes, tmp_path)
        assert written(disk, 0, 40)
        path = disk.folder / f"{name}.kept"
        with path.open("rb") as file:
            header = read_header(file) | {key: value}
        if value == "missing":
            del header[key]
        forge(path, json.dumps(header).encode())
        assert disk.read(name) is None or key in ("name", "after", "seconds")
        assert written(disk, 40, 50)
        assert PrefixCacheDisk("a model", quota_bytes, tmp_path).list_segments() == []


@pytest.mark.parametrize("heads", [None, 3, [], {"a": -1}, {"a": "1"}, {"a": True}, {"a": 301}])
def test_files_with_invalid_sizes_of_heads_are_ignored(tmp_path: Path, heads: Any) -> None:
    disk = PrefixCacheDisk("a model", 1 << 30, tmp_path)
    assert written(disk, 0, 40)
    name = name_of(TEXT[:40], 0)
    path = disk.folder / f"{name}.kept"
    with path.open("rb") as file:
        header = read_header(file) | {"heads": heads}
    forge(path, json.dumps(header).encode())
    assert disk.read(name) is None


@pytest.mark.parametrize(
    "header",
    [b"[]", b"7", b"null", b"[" * 100_000, b"\xff", b""],
    ids=["list", "number", "null", "deeply nested list", "invalid UTF-8", "empty"],
)
def test_files_whose_header_is_no_json_object_are_ignored(tmp_path: Path, header: bytes) -> None:
    disk = PrefixCacheDisk("a model", 1 << 30, tmp_path)
    assert written(disk, 0, 40)
    forge(disk.folder / f"{name_of(TEXT[:40], 0)}.kept", header)
    assert disk.read(name_of(TEXT[:40], 0)) is None
    assert disk.list_segments() == []
