"""The prefix cache on disk: damaged files are ignored, the quota holds, and clearing removes everything.

Files with forged headers are ignored without an error.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.memory.prefix_cache.disk import (
    _MAGIC,
    _SIZES,
    PrefixCacheDisk,
    Tokens,
    default_disk_bytes,
    delete_cached_prefixes,
    read_header,
)
from edgespec.memory.prefix_cache.store import name_of, tokens_digest
from edgespec.methods.suffix.saved_replies import delete_saved_replies
from edgespec.model.base import Snapshot
from edgespec.system.files import write_private_file

TEXT = np.arange(50, dtype=np.int32)
PLENTY = 1 << 30
KEYS = ("identity", "name", "after", "start", "end", "data_bytes", "seconds", "tokens_sum", "sums")


def put(disk: PrefixCacheDisk, text: Tokens, start: int = 0, *, seconds: float = 1.0, size: int = 300) -> str:
    """Create a segment from `start` to the end of the tokens."""
    name = name_of(text, start)
    data = bytes(np.random.default_rng(len(text)).integers(0, 256, size, np.uint8))
    assert disk.write(
        name, tokens_digest(text[:start]), text[start:], Snapshot(len(text), data, start), seconds
    )
    return name


def file_of(disk: PrefixCacheDisk, name: str) -> Path:
    return disk.folder / f"{name}.kept"


def test_a_segment_survives_a_round_trip(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    names = [put(disk, TEXT[:30]), put(disk, TEXT, 30)]
    again = PrefixCacheDisk("a model", PLENTY, tmp_path)
    assert [piece.name for piece in again.list_segments()] == names
    first, last = again.list_segments()
    assert (first.start, first.after, last.start, last.after) == (0, "", 30, tokens_digest(TEXT[:30]))
    assert np.array_equal(np.concatenate([first.tokens, last.tokens]), TEXT)
    read = again.read(names[1])
    assert read is not None
    assert (read.start, read.length, len(read.data)) == (30, 50, 300)


def test_the_states_of_heads_are_stored_in_the_same_file(tmp_path: Path) -> None:
    disk, name = PrefixCacheDisk("a model", PLENTY, tmp_path), name_of(TEXT, 0)
    heads = {"eagle": bytes(range(90)), "medusa": b"", "hydra": b"state"}
    assert disk.write(name, "", TEXT, Snapshot(50, b"data", 0, heads), 1.0)
    (segment,) = disk.list_segments()
    assert segment.data_bytes == 4 + 95
    assert disk.read(name) == Snapshot(50, b"data", 0, heads)
    path = file_of(disk, name)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert disk.read(name) is None


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_files_are_private(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path / "kept")
    put(disk, TEXT)
    for path in (tmp_path / "kept").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_file_is_never_used(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path_factory.mktemp("kept"))
    name = put(disk, TEXT)
    path = file_of(disk, name)
    whole = path.read_bytes()
    expected = disk.read(name)
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "fill", "grow"]))
    if how == "cut":
        path.write_bytes(whole[:at])
    elif how == "flip":
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
        )
    elif how == "fill":
        path.write_bytes(whole[:at] + b"\0" * (len(whole) - at))
    else:
        path.write_bytes(whole + b"x")
    changed = path.read_bytes() != whole
    again = PrefixCacheDisk("a model", PLENTY, disk.folder.parent)
    usable = [piece.name for piece in again.list_segments()]
    assert not changed or again.read(name) is None
    if not changed:
        assert usable == [name]
        assert again.read(name) == expected
    else:
        # Once it was looked into it is gone.
        assert not path.exists()


def test_segments_without_a_parent_are_deleted(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    first = put(disk, TEXT[:30])
    last = put(disk, TEXT, 30)
    disk.remove([first])
    assert PrefixCacheDisk("a model", PLENTY, tmp_path).list_segments() == []
    assert not file_of(disk, last).exists()


def test_another_model_has_no_segments(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    name = put(disk, TEXT)
    other = PrefixCacheDisk("another model", PLENTY, tmp_path)
    assert other.list_segments() == []
    other.folder.mkdir()
    file_of(other, name).write_bytes(file_of(disk, name).read_bytes())
    assert other.read(name) is None
    assert other.list_segments() == []
    assert len(disk.list_segments()) == 1


def test_the_quota_evicts_the_least_valuable_leaves(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", 6000, tmp_path)
    shared = put(disk, TEXT[:20], seconds=1e-6)
    cheap = put(disk, TEXT[5:40], seconds=1e-3)
    dear = put(disk, TEXT, 20, seconds=10.0)
    for seed in range(20):
        put(disk, np.random.default_rng(seed).integers(100, 200, 40, np.int32), seconds=1.0, size=900)
        assert disk.used_bytes() <= 6000
    names = {piece.name for piece in disk.list_segments()}
    assert {shared, dear} <= names
    assert cheap not in names
    assert not disk.write("x", "", TEXT, Snapshot(50, bytes(7000)), 1.0)


def test_writing_a_segment_does_not_evict_its_parent(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", 4000, tmp_path)
    first = put(disk, TEXT[:20], seconds=1e-6)
    put(disk, TEXT[5:40], seconds=1.0, size=2000)
    last = put(disk, TEXT, 20, seconds=1e-3, size=2000)
    assert [piece.name for piece in disk.list_segments()] == [first, last]


def test_a_segment_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", 4000, tmp_path)
    names = {put(disk, TEXT[:20], size=2000), put(disk, TEXT[5:40])}
    copy = Snapshot(50, bytes(2000), 20)
    assert not disk.write(name_of(TEXT, 20), tokens_digest(TEXT[:20]), TEXT[20:], copy, 100.0)
    assert {piece.name for piece in disk.list_segments()} == names


def test_writers_take_turns_and_delete_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.memory.prefix_cache.disk._LOCK_SECONDS", 0.05)
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    put(disk, TEXT[:20])
    litter = disk.folder / ".half.kept.abc.tmp"
    litter.write_bytes(b"half")
    with FileLock(tmp_path / "lock"):
        assert not disk.write("x", "", TEXT, Snapshot(50, b"data"), 1.0)
        assert litter.exists()
    put(disk, TEXT[:30])
    assert not litter.exists()


def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("in the way")
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path / "kept")
    assert disk.list_segments() == []
    assert not disk.write("x", "", TEXT, Snapshot(50, b"data"), 1.0)
    assert "not caching earlier chats in" in disk.notice


def test_too_little_memory_to_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path, *_payload: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr("edgespec.memory.prefix_cache.disk.write_private_file", refused)
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    assert not disk.write("x", "", TEXT, Snapshot(50, b"data"), 1.0)
    assert "memoryerror" in disk.notice


def test_cleared_segments_are_not_written_again(tmp_path: Path) -> None:
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
    put(disk, TEXT)
    assert delete_cached_prefixes(tmp_path) > 300
    assert disk.list_segments() == []
    assert disk.was_cleared
    assert not disk.write("x", "", TEXT, Snapshot(50, b"data"), 1.0)
    disk.acknowledge_clear()
    put(disk, TEXT)
    assert len(disk.list_segments()) == 1


def test_a_kill_while_clearing_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later writer could not tell that a temporary file next to the marker has no owner."""
    made: list[object] = []
    for name, forget in (("kept", delete_cached_prefixes), ("chats", delete_saved_replies)):
        with monkeypatch.context() as patched, suppress(TypeError):  # nothing was made
            patched.setattr(tempfile, "mkstemp", lambda **options: made.append(options))
            forget(tmp_path / name)
        assert made == []
        assert [path.name for path in (tmp_path / name).iterdir() if path.name != "lock"] == ["forgotten"]


def test_the_default_quota_leaves_most_of_the_disk(tmp_path: Path) -> None:
    bound = default_disk_bytes(tmp_path / "not there yet")
    assert 0 < bound <= 4 << 30


def test_a_folder_without_permissions_is_empty(tmp_path: Path) -> None:
    """With another user's folder, the model loads, and reports that nothing is cached."""
    disk = PrefixCacheDisk("a model", PLENTY, tmp_path / ("x" * 300))
    assert disk.list_segments() == []
    assert disk.used_bytes() == 0
    assert not disk.write(name_of(TEXT, 0), tokens_digest(TEXT[:0]), TEXT, Snapshot(50, b"state"), 1.0)
    assert "not caching earlier chats" in disk.notice


def test_a_lower_quota_evicts_at_start(tmp_path: Path) -> None:
    names = [put(PrefixCacheDisk(model, PLENTY, tmp_path), TEXT) for model in ("a model", "another")]
    both = PrefixCacheDisk("a model", PLENTY, tmp_path).used_bytes()
    assert len(PrefixCacheDisk("a model", both, tmp_path).list_segments()) == 1
    less = PrefixCacheDisk("a model", both - 1, tmp_path)
    less.list_segments()
    assert less.used_bytes() == both // len(names)
    assert PrefixCacheDisk("a model", 0, tmp_path).list_segments() == []
    assert less.used_bytes() == 0


def test_a_file_that_another_program_replaced_is_not_deleted(tmp_path: Path) -> None:
    name = put(PrefixCacheDisk("a model", PLENTY, tmp_path), TEXT)
    done = Event()

    def write_again() -> None:
        other = PrefixCacheDisk("a model", PLENTY, tmp_path)
        while not done.is_set():
            for seconds in (1.0, 1.0 / 3.0):  # which makes headers of two lengths
                put(other, TEXT, seconds=seconds)

    writer = Thread(target=write_again)
    writer.start()
    try:
        disk = PrefixCacheDisk("a model", PLENTY, tmp_path)
        for _ in range(300):
            assert disk.read(name) is not None
            assert [piece.name for piece in disk.list_segments()] == [name]
    finally:
        done.set()
        writer.join()


def test_clearing_during_a_write_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, forgotten = Event(), Event()

    def slowly(path: Path, *payload: bytes) -> None:
        begun.set()
        forgotten.wait(0.5)
        write_private_file(path, *payload)

    monkeypatch.setattr("edgespec.memory.prefix_cache.disk.write_private_file", slowly)
    writer = Thread(target=put, args=(PrefixCacheDisk("a model", PLENTY, tmp_path), TEXT))
    writer.start()
    begun.wait()
    monkeypatch.setattr("edgespec.memory.prefix_cache.disk.write_private_file", write_private_file)
    delete_cached_prefixes(tmp_path)
    forgotten.set()
    writer.join()
    assert not list(tmp_path.rglob("*.kept"))


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
