"""edgespec's folders, and atomic and private file writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.files import (
    cache_folder,
    config_folder,
    data_folder,
    format_bytes,
    make_private_folder,
    replace_when_written,
    write_private_file,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("EDGESPEC_DATA_DIR", data_folder),
        ("EDGESPEC_CACHE_DIR", cache_folder),
        ("EDGESPEC_CONFIG_DIR", config_folder),
    ],
)
def test_environment_variables_set_the_folders(
    variable: str, folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.setenv(variable, "~/elsewhere")
    assert folder() == Path.home() / "elsewhere"
    # Values read from a file may end with a line break.
    monkeypatch.setenv(variable, f"{tmp_path}\r\n")
    assert folder() == tmp_path
    monkeypatch.delenv(variable)
    assert "edgespec" in str(folder())


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for payload in (b"first", b"second"):
        write_private_file(path, payload)
        assert path.read_bytes() == payload
        assert mode(path) == 0o600
    assert mode(path.parent) == 0o700


def test_old_temporary_files_are_deleted_and_recent_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "[file]"
    left, fresh, others = (tmp_path / f".{name}.tmp" for name in ("[file].abc", "[file].def", "other.abc"))
    for one in (left, fresh, others):
        one.write_bytes(b"half")
    for one in (left, others):
        os.utime(one, (1e9, 1e9))
    write_private_file(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, others])


def test_existing_folders_become_private_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    write_private_file(folder / "file", b"")
    assert mode(folder) == 0o755
    make_private_folder(folder)
    assert mode(folder) == 0o700


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_private_file(path, b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private_file(path, b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_a_file_is_replaced_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("before")

    def write(text: str, error: Exception | None = None) -> None:
        with replace_when_written(path) as temporary:
            assert temporary.parent == path.parent
            temporary.write_text(text)
            if error:
                raise error

    with pytest.raises(ValueError, match="half-way"):
        write("half", ValueError("half-way"))
    assert path.read_text() == "before"
    write("after")
    assert path.read_text() == "after"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1500, "1.5 KiB"),
        (104_700_000, "99.8 MiB"),
        (123_456_789, "118 MiB"),
        (1_048_051_711, "999 MiB"),
        (1_048_100_000, "1.0 GiB"),
        (8 << 30, "8.0 GiB"),
        (200 << 40, "200 TiB"),
        (2000 << 40, "2,000 TiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
