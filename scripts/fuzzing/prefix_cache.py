"""Fuzz prefix cache files: wrong values with correct checksums, and damaged bytes."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, encode_header, read_header
from edgespec.memory.prefix_cache.store import name_of, tokens_digest
from edgespec.model.base import Snapshot
from scripts.fuzzing.mutations import damage, damage_json, several
from scripts.fuzzing.worker import Files

_IDENTITY = "0123456789abcdef" * 4
_QUOTA_BYTES = 1 << 20
# States of two heads.
_HEADS = {"a head": bytes(range(100)), "another head": b""}


@cache
def _segments() -> dict[str, bytes]:
    """Return the files of two segments, the second of which extends the first."""
    tokens = np.arange(50, dtype=np.int32)
    with TemporaryDirectory() as name:
        disk = PrefixCacheDisk(_IDENTITY, _QUOTA_BYTES, Path(name))
        for start, end in ((0, 30), (30, 50)):
            snapshot = Snapshot(end, bytes(range(200)), start, _HEADS)
            disk.write(
                name_of(tokens[:end], start), tokens_digest(tokens[:start]), tokens[start:end], snapshot, 1.0
            )
        return {path.name: path.read_bytes() for path in sorted(disk.folder.iterdir())}


def make(rng: Random) -> Files:
    """Return both files, one of them damaged."""
    files = dict(_segments())
    name = rng.choice(sorted(files))
    data = files[name]
    if rng.random() < 0.6:
        stream = io.BytesIO(data)
        header = several(rng, read_header(stream), damage_json)
        data = encode_header(header) + stream.read()
    if rng.random() < 0.6:
        data = several(rng, data, damage)
    del files[name]
    # Sometimes store a segment under another segment's name.
    files[rng.choice((name, name, name, "x.kept", *sorted(_segments())))] = data
    return {f"{_IDENTITY[:32]}/{each}": content for each, content in files.items()}


def run(folder: Path) -> None:
    """List and read all segments, then write another one, which may delete some."""
    whole = _segments()
    disk = PrefixCacheDisk(_IDENTITY, _QUOTA_BYTES, folder)
    for segment in disk.list_segments():
        snapshot = disk.read(segment.name)
        if snapshot is not None:
            assert f"{segment.name}.kept" in whole, "a damaged segment was used"
            assert bytes(snapshot.data) == bytes(range(200)), "a damaged segment was used"
            assert snapshot.heads == _HEADS, "a damaged segment was used"
    tokens = np.arange(100, 110, dtype=np.int32)
    small = PrefixCacheDisk(_IDENTITY, 2000, folder)
    small.write(name_of(tokens, 0), "", tokens, Snapshot(10, bytes(300), 0), 1.0)
    small.list_segments()
