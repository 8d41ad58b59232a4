"""Prepared models are complete or absent, resumed after interruptions, and rejected when damaged."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edgespec.errors import CancelledError, CapabilityError, ModelFileError, OptionError
from edgespec.store.prepared_builder import BuildFolder, build
from edgespec.store.prepared_files import (
    MANIFEST,
    PreparedModel,
    check_prepared,
    find_prepared,
    read_prepared,
    store_folder,
)
from tests.raising import raises

_SETTINGS = {"exit_layer": 3}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 20_000)
    return path


class Writer:
    """Writes two files and counts calls. Raises an error before writing the file `stop_at`."""

    def __init__(self, stop_at: str = "", error: BaseException | None = None) -> None:
        self.written: list[str] = []
        self._stop_at, self._error = stop_at, error

    def __call__(self, bench: BuildFolder) -> Mapping[str, Any]:
        for name in ("first", "second"):
            if name == self._stop_at and self._error:
                raise self._error
            bench.file(name, self._write)
        return {"layers": 12}

    def _write(self, path: Path) -> None:
        self.written.append(path.name.removesuffix(".tmp"))
        path.write_bytes(path.name.encode() * 100_000)


def _made(source: Path, write: Writer | None = None, **options: Any) -> PreparedModel:
    return build("layerskip", source, _SETTINGS, write or Writer(), needed_bytes=1000, **options)


def test_a_built_model_is_found_and_valid(source: Path) -> None:
    made = _made(source)
    assert find_prepared("layerskip", source, _SETTINGS) == read_prepared(made.folder) == made
    assert find_prepared("layerskip", source) == made
    assert find_prepared("layerskip", source, {"exit_layer": 4}) is None
    assert find_prepared("lowbit", source) is None
    assert made.folder.is_relative_to(store_folder())
    assert {path.name for path in made.folder.iterdir()} == {"first", "second", "edgespec.json"}
    check_prepared(made, source, full=True)


def test_it_is_built_once(source: Path) -> None:
    _made(source)
    again = Writer()
    _made(source, again)
    assert again.written == []


def test_a_folder_outside_the_store_is_found(source: Path, tmp_path: Path) -> None:
    made = _made(source, to=tmp_path / "mine")
    assert made.folder == tmp_path / "mine"
    assert find_prepared("layerskip", source, _SETTINGS) == made
    shutil.rmtree(made.folder)
    assert find_prepared("layerskip", source, _SETTINGS) is None


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode here")
def test_a_folder_name_that_is_not_unicode(source: Path, tmp_path: Path) -> None:
    made = _made(source, to=tmp_path / os.fsdecode(b"mine\xff"))
    assert find_prepared("layerskip", source, _SETTINGS) == made


def test_links_are_followed_and_broken_links_are_errors(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    with raises(OptionError, "link"):
        _made(source, to=link)
    assert not (tmp_path / "link.partial").exists()
    (tmp_path / "mine").mkdir()
    assert _made(source, to=link).folder == tmp_path / "mine"
    assert find_prepared("layerskip", source, _SETTINGS)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_an_unwritable_folder_fails_at_once(source: Path) -> None:
    def progress(what: str, fraction: float) -> bool:
        return "waiting" not in what

    with raises(ModelFileError, "/proc/foo", "use --to", code="file_not_written"):
        _made(source, to=Path("/proc/foo"), progress=progress)


def test_the_hint_for_a_foreign_folder_in_the_store(source: Path) -> None:
    folder = _made(source).folder
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    with raises(OptionError, "because edgespec", code="output_exists"):
        _made(source)


def test_other_folders_are_never_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with raises(OptionError, "is not", code="output_exists"):
        _made(source, to=tmp_path / "mine")
    made = _made(source, to=tmp_path / "empty")
    with raises(OptionError, "different settings", code="output_exists"):
        build("layerskip", source, {"exit_layer": 9}, Writer(), needed_bytes=1, to=made.folder)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("manifest", ['{"theme": "dark"}', '{"version": 1, "kind": "letters"}', "not JSON"])
def test_a_folder_with_an_invalid_manifest_is_kept(source: Path, tmp_path: Path, manifest: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    (mine / "edgespec.json").write_text(manifest)
    with raises(OptionError, "cannot be used", code="output_exists"):
        _made(source, to=mine)
    assert (mine / "edgespec.json").read_text() == manifest
    assert (mine / "letter.txt").read_text() == "dear"


def test_foreign_files_in_a_damaged_folder_are_kept(source: Path, tmp_path: Path) -> None:
    made = _made(source, to=tmp_path / "mine")
    letter = made.folder / "letter.txt"
    letter.write_text("dear")
    (made.folder / "first").write_bytes(b"")
    with raises(OptionError, "letter.txt", code="output_exists"):
        _made(source, to=made.folder)
    letter.unlink()
    assert _made(source, to=made.folder) == made


def test_a_foreign_partial_folder_is_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "letter.txt").write_text("dear")
    with raises(OptionError, "contains files", code="output_exists"):
        _made(source, to=tmp_path / "mine")
    with raises(OptionError, "prepared model", code="output_exists"):
        _made(source, to=Path(tmp_path.anchor))
    assert (tmp_path / "mine.partial" / "letter.txt").read_text() == "dear"


def test_files_of_an_interrupted_build_with_other_settings_are_not_used(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _made(source, Writer("second", KeyboardInterrupt()), to=tmp_path / "mine")
    again = Writer()
    build("layerskip", source, {"exit_layer": 9}, again, needed_bytes=1, to=tmp_path / "mine")
    assert again.written == ["first", "second"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CancelledError("cancelled"), OSError(28, "full")])
def test_an_interrupted_build_is_resumed(source: Path, error: BaseException) -> None:
    with pytest.raises((KeyboardInterrupt, CancelledError, ModelFileError)):
        _made(source, Writer("second", error))
    assert find_prepared("layerskip", source) is None
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["second"]


@pytest.mark.parametrize("step", ["unlink", "rename"])
@pytest.mark.parametrize("own", [False, True])
def test_a_build_killed_at_the_end_is_completed_by_the_next(
    source: Path, tmp_path: Path, step: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    to = tmp_path / "mine" if own else None
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, killed)
        with pytest.raises(KeyboardInterrupt):
            _made(source, to=to)
    assert find_prepared("layerskip", source) is None
    again = Writer()
    check_prepared(_made(source, again, to=to), source, full=True)
    assert again.written == []


def test_an_interrupted_deletion_is_completed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path) -> NoReturn:
        (folder / MANIFEST).unlink()
        raise KeyboardInterrupt

    made = _made(source)
    made.path("first").write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            _made(source)
    check_prepared(_made(source), source, full=True)


def test_a_damaged_finished_file_is_written_again(source: Path) -> None:
    with pytest.raises(CancelledError):
        _made(source, Writer("second", CancelledError("cancelled")))
    (kept,) = store_folder().rglob("first")
    kept.write_bytes(b"x" * kept.stat().st_size)
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["first", "second"]


def test_finished_files_are_not_used_if_the_source_changed(source: Path) -> None:
    with pytest.raises(CancelledError):
        _made(source, Writer("second", CancelledError("cancelled")))
    source.write_bytes(b"GGUF" + b"other" * 1000)
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["first", "second"]


def overwritten(source: Path) -> None:
    """Overwrite a byte that is in no sample of the file."""
    with source.open("r+b") as file:
        file.seek(1_100_000)
        file.write(b"\xff\xfe")


def test_a_model_with_a_modified_source_is_built_again(source: Path) -> None:
    _made(source)
    overwritten(source)
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["first", "second"]


def test_a_source_that_changes_between_builds_restarts_the_build(source: Path) -> None:
    with pytest.raises(CancelledError):
        _made(source, Writer("second", CancelledError("cancelled")))
    overwritten(source)
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["first", "second"]


def test_a_touched_source_is_read_again_and_the_build_resumed(source: Path) -> None:
    with pytest.raises(CancelledError):
        _made(source, Writer("second", CancelledError("cancelled")))
    os.utime(source, (1e9, 1e9))
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["second"]


@pytest.mark.parametrize("change", [overwritten, lambda source: source.write_bytes(b"GGUF other")])
def test_a_source_that_changes_during_the_build_is_an_error(
    source: Path, change: Callable[[Path], object]
) -> None:
    class Changing(Writer):
        def _write(self, path: Path) -> None:
            super()._write(path)
            change(source)

    with raises(ModelFileError, code="prepared_outdated"):
        _made(source, Changing())
    assert find_prepared("layerskip", source) is None
    again = Writer()
    check_prepared(_made(source, again), source, full=True)
    assert again.written == ["first", "second"]


def test_a_capability_error_deletes_the_partial_folder(source: Path) -> None:
    with pytest.raises(CapabilityError):
        _made(source, Writer("second", CapabilityError("it cannot be split")))
    assert not [path for path in store_folder().rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("damage", ["cut", "head", "gone"])
def test_a_damaged_file_is_an_error_and_built_again(source: Path, damage: str, full: bool) -> None:
    made = _made(source)
    path = made.path("first")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "head":
        path.write_bytes(b"X" + path.read_bytes()[1:])
    else:
        path.unlink()
    with raises(ModelFileError, "damaged", code="prepared_outdated") as failure:
        check_prepared(made, full=full)
    assert "run `edgespec prepare` again" in str(failure.value)
    check_prepared(_made(source), source, full=True)


def test_a_full_check_detects_any_changed_byte(source: Path) -> None:
    made = _made(source)
    path = made.path("second")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with raises(ModelFileError, "damaged", code="prepared_outdated"):
        check_prepared(made, full=True)


def test_a_changed_source_is_an_error(source: Path) -> None:
    made = _made(source)
    source.write_bytes(b"GGUF" + source.read_bytes()[4:][::-1])
    check_prepared(made)
    with raises(ModelFileError, "since", code="prepared_outdated"):
        check_prepared(made, source)


def test_free_space_is_checked_before_writing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 5 * 2**30))
    write = Writer()
    with raises(ModelFileError, "7.0 GiB", "5.0 GiB", code="disk_full"):
        build("layerskip", source, _SETTINGS, write, needed_bytes=7 * 2**30)
    assert write.written == []
    assert not list(store_folder().rglob("first*"))


def test_two_concurrent_builds_run_once(source: Path) -> None:
    writers = [Writer() for _ in range(4)]
    threads = [threading.Thread(target=_made, args=(source, writer)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(writer.written) for writer in writers) == [0, 0, 0, 2]


def test_progress_can_cancel(source: Path) -> None:
    with pytest.raises(CancelledError):
        _made(source, progress=lambda what, fraction: False)


@pytest.mark.parametrize("content", [b"", b"PK\3\4", None])
def test_a_source_that_is_not_a_model_is_an_error(source: Path, content: bytes | None) -> None:
    if content is None:
        source.unlink()
    else:
        source.write_bytes(content)
    with raises(ModelFileError, source, code="model_file_unreadable" if content is None else "wrong_file"):
        _made(source)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "kind": "other"}'])
def test_an_invalid_manifest_is_an_error(source: Path, manifest: str) -> None:
    made = _made(source)
    (made.folder / "edgespec.json").write_text(manifest)
    with raises(ModelFileError, "delete", code="prepared_outdated"):
        read_prepared(made.folder)
    assert find_prepared("layerskip", source) is None
