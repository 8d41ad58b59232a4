"""What a file takes up on its disk, and how fast the disk is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edgespec.system.disks import (
    READ_BYTES,
    drop_cached,
    folder_bytes_per_second,
    is_sparse,
    network_drive,
    open_uncached,
    read_bytes_per_second,
    stores_holes,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems need none of this")

_MEMORY = Path("/dev/shm")


def _with_hole(folder: Path, size_bytes: int) -> Path:
    path = folder / "file"
    with path.open("wb") as file:
        file.write(b"header")
        file.truncate(size_bytes)
    return path


def test_files_that_consist_of_holes_are_sparse(tmp_path: Path) -> None:
    path = _with_hole(tmp_path, 1 << 20)
    assert is_sparse(path)
    path.write_bytes(bytes(1 << 20))
    assert not is_sparse(path)


@pytest.mark.skipif(not _MEMORY.is_mount(), reason="needs a memory file system")
@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 5])
def test_a_memory_file_system_stores_mapped_holes(tmp_path: Path, size_bytes: int) -> None:
    assert not stores_holes(_with_hole(tmp_path, size_bytes))
    with TemporaryDirectory(dir=_MEMORY) as folder:
        assert stores_holes(_with_hole(Path(folder), size_bytes))


def test_the_disk_of_a_folder_is_measured_without_leaving_files(tmp_path: Path) -> None:
    assert folder_bytes_per_second(tmp_path / "later") > 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the parts of files that are removed from the page cache, as (offset, size) tuples."""
    parts, advise = [], os.posix_fadvise

    def record(file: int, offset: int, size_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        parts.append((offset, size_bytes))
        advise(file, offset, size_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    return parts


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = open_uncached(path)
    try:
        yield file
    finally:
        os.close(file)


def test_what_is_read_through_the_page_cache_is_dropped(
    tmp_path: Path, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * READ_BYTES))
    # Some file systems have no way to bypass the cache.
    monkeypatch.setattr(os, "O_DIRECT", 0)
    with _opened(path) as file:
        drop_cached(file, 4096, 8192)
    assert dropped == [(4096, 8192)]
    assert read_bytes_per_second(path) > 0
    # Each part is also dropped before it is read. Otherwise, the cache would be measured instead of the disk.
    parts = dropped[1:]
    assert {offset for offset, _ in parts} <= {0, READ_BYTES, 2 * READ_BYTES}
    assert parts
    assert len(parts) % 2 == 0


def test_the_page_cache_is_left_alone_if_it_is_bypassed(
    tmp_path: Path, dropped: list[tuple[int, int]]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with _opened(path) as file:
        if not _is_direct(file):
            pytest.skip("this file system cannot bypass the page cache")
        drop_cached(file, 0, 1 << 20)
    assert not dropped


def _is_direct(file: int) -> bool:
    from fcntl import F_GETFL, fcntl

    return bool(fcntl(file, F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(
    ("kind", "expected"), [("ext4", ""), ("nfs4", "nfs4"), ("fuse.sshfs", "sshfs"), ("fuse.ntfs-3g", "")]
)
def test_network_drives_are_recognised(tmp_path: Path, kind: str, expected: str) -> None:
    mounts, device = tmp_path / "mountinfo", tmp_path.stat().st_dev
    mounts.write_bytes(
        b"22 27 0:0 / /proc rw,relatime - proc proc rw\n"
        b"23 27 0:1 / /odd\x0cplace\xff rw,relatime shared:1 - nfs server:/ rw\n"
        + f"27 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} /dev/vda rw\n".encode()
    )
    assert network_drive(tmp_path / "later" / "model.gguf", mounts) == expected


def test_without_a_list_of_mounts_no_network_drive_is_recognised(tmp_path: Path) -> None:
    assert network_drive(tmp_path, tmp_path / "missing") == ""
