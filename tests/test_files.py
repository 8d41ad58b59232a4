"""Where files are kept, and how they are written: whole or not there, private ones for their owner only."""

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
def test_a_folder_can_be_chosen(
    variable: str, folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.setenv(variable, "~/elsewhere")
    assert folder() == Path.home() / "elsewhere"
    # As from a file that a service reads.
    monkeypatch.setenv(variable, f"{tmp_path}\r\n")
    assert folder() == tmp_path
    monkeypatch.delenv(variable)
    assert "edgespec" in str(folder())


def test_a_private_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for payload in (b"first", b"second"):
        write_private_file(path, payload)
        assert path.read_bytes() == payload
        assert mode(path) == 0o600
    assert mode(path.parent) == 0o700


def test_what_a_killed_writer_left_goes_with_the_next_but_one_that_may_still_write(tmp_path: Path) -> None:
    path = tmp_path / "[file]"
    left, fresh, others = (tmp_path / f".{name}.tmp" for name in ("[file].abc", "[file].def", "other.abc"))
    for one in (left, fresh, others):
        one.write_bytes(b"half")
    for one in (left, others):
        os.utime(one, (1e9, 1e9))
    write_private_file(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, others])


def test_a_folder_that_is_there_is_made_private_only_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    write_private_file(folder / "file", b"")
    assert mode(folder) == 0o755
    make_private_folder(folder)
    assert mode(folder) == 0o700


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_private_file(path, b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private_file(path, b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_a_file_takes_the_place_of_another_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("before")

    def write(text: str, error: Exception | None = None) -> None:
        with replace_when_written(path) as growing:
            assert growing.parent == path.parent
            growing.write_text(text)
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
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
