"""edgespec's folders, and atomic and private file writes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from edgespec.errors import ConfigurationError
from edgespec.system.disks import append_error, free_bytes, write_error
from edgespec.system.files import (
    cache_folder,
    config_folder,
    data_folder,
    error_reason,
    format_bytes,
    format_number,
    format_rate,
    home_folder,
    make_private_folder,
    read_regular_file,
    replace_when_written,
    write_advice,
    write_private_file,
)
from tests.raising import raises


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


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("EDGESPEC_DATA_DIR", data_folder),
        ("EDGESPEC_CACHE_DIR", cache_folder),
        ("EDGESPEC_CONFIG_DIR", config_folder),
    ],
)
@pytest.mark.parametrize("value", ["relative", "./here", ".", "~nobody-by-this-name/x", " "])
def test_relative_folders_are_refused(
    variable: str, folder: Callable[[], Path], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with raises(ConfigurationError, variable, repr(value)):
        folder()


def test_relative_xdg_folders_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.delenv(f"EDGESPEC_{name}_DIR")
        monkeypatch.setenv(f"XDG_{name}_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    for folder in (data_folder(), cache_folder(), config_folder()):
        assert folder.is_relative_to("/home/me")


def test_an_unknown_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESPEC_DATA_DIR")
    monkeypatch.setenv("HOME", "~")
    assert home_folder() is None
    # platformdirs returns a relative path for a user id without an entry in the user database.
    monkeypatch.setattr(platformdirs, "user_data_path", lambda *_, **__: Path("~/.local/share/edgespec"))
    with raises(ConfigurationError, "HOME or EDGESPEC_DATA_DIR"):
        data_folder()


def test_what_to_do_about_a_full_disk_and_a_read_only_folder(tmp_path: Path) -> None:
    full, denied = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EACCES))
    assert error_reason(full) == "the disk is full"
    assert write_advice(full, tmp_path) == (
        f"free some space on the disk that contains {tmp_path}, for example with"
        " `edgespec delete-data prefix-cache`"
    )
    assert write_advice(denied, tmp_path, "--to") == (
        f"make {tmp_path} writable for your user, or use --to with a folder on another disk"
    )


def test_a_file_size_limit_is_not_a_full_disk(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, before[1]))
    try:
        errors = [write_error(tmp_path), append_error(tmp_path / "new")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for error in errors:
        assert error is not None
        assert error_reason(error) == "the file size limit was reached"
        assert write_advice(error, tmp_path, "HF_HUB_CACHE") == (
            "raise the limit with `ulimit -f unlimited` (a FAT32 disk allows at most 4 GiB per file),"
            " or set HF_HUB_CACHE to a folder on another disk"
        )


def test_a_write_that_is_tried(tmp_path: Path) -> None:
    assert write_error(tmp_path / "a" / "b") is None
    assert free_bytes(tmp_path / "a" / "b") > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    error = write_error(tmp_path / "file" / "b")
    assert error is not None
    assert error_reason(error) == "not a directory"


def test_special_and_large_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="the limit of 4 bytes"):
        read_regular_file(tmp_path / "file", 4)


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
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]
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


@pytest.mark.parametrize(
    ("per_second", "decimals", "text"),
    [(0.0312, 0, "0.031"), (0.97, 0, "0.97"), (3.14, 0, "3.1"), (12.34, 0, "12"), (12.34, 1, "12.3")],
)
def test_a_slow_speed_is_not_rounded_to_zero(per_second: float, decimals: int, text: str) -> None:
    assert format_rate(per_second, decimals) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.00123, 3, "0.00123"),
        (12.34, 3, "12.3"),
        (999.6, 3, "1,000"),
        (3350.0, 3, "3,350"),
        (124.0, 2, "124"),
    ],
)
def test_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text
