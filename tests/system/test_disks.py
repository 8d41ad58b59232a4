"""What a file takes up on its disk, and how fast the disk is."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edgespec.system.disks import folder_bytes_per_second, is_sparse, stores_holes

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
