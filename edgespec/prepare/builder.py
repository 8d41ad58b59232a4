"""Making something for the store: one run at a time, and one that was interrupted is gone on with.

A folder is written beside its name and renamed when it is whole, so that one that has its name can be
used. What an interrupted run had finished is kept for the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import Any

from edgespec.backends.base import Progress
from edgespec.errors import CancelledError, CapabilityError, ModelFileError, OptionError
from edgespec.files import error_reason, format_bytes, replace_when_written, sync_to_disk
from edgespec.prepare.file_records import FileRecord, hash_files, matches_record
from edgespec.prepare.store import (
    MANIFEST,
    VERSION,
    BuildSettings,
    PreparedKind,
    PreparedModel,
    absolute_path,
    check_prepared,
    model_files,
    read_prepared,
    store_folder,
)

__all__ = ["BuildFolder", "interrupted_settings", "make"]

_JOURNAL = "journal.json"
_WAIT_SECONDS = 0.2
_NO_ROOM = (ENOSPC, EDQUOT, EFBIG, EIO)
_NAME_ANOTHER = "name a folder that is not there"


class BuildFolder:
    """The folder of a prepared thing while it is made."""

    def __init__(
        self, folder: Path, source: Path, finished: dict[str, FileRecord], save: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.source = source
        self._finished = finished
        self._save = save

    def file(self, name: str, write: Callable[[Path], None], progress: Progress | None = None) -> Path:
        """The path of the file `name`, which `write` makes unless an earlier run has."""
        path = self.folder / name
        known = self._finished.get(name)
        if known is not None:
            with suppress(ModelFileError):
                if hash_files([path], f"checking {name}", progress)[0] == known:
                    return path
            del self._finished[name]
        with replace_when_written(path) as growing:
            write(growing)
        self._finished[name] = hash_files([path], f"checking {name}", progress)[0]
        self._save()
        return path


def make(
    kind: PreparedKind,
    source: Path,
    settings: BuildSettings,
    write: Callable[[BuildFolder], Mapping[str, Any]],
    *,
    needed_bytes: int,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Prepare something, or return it when it is there and still right.

    write: makes the files on the workbench and returns facts for the manifest. When it raises
    CapabilityError nothing is left behind; after any other end the finished files are kept, and the next
    run goes on from there. to: the folder to make; by default one in the store.
    Raises ModelFileError (the source cannot be read, or the disk is too small), OptionError (`to` is
    another folder's place) and CancelledError.
    """
    source = absolute_path(source)
    parts = model_files(source)
    entry = store_folder() / kind / _entry_name(source, settings)
    folder = absolute_path(entry if to is None else to)
    if folder.is_symlink():
        if not folder.exists():
            raise OptionError(f"{folder} is a link to nothing", "delete it, or name another folder")
        folder = folder.resolve()
    if not folder.name:
        raise OptionError(f"{folder} exists and holds something else", _NAME_ANOTHER)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A lock that can never be made would be waited for like one that is held.
        tempfile.TemporaryFile(dir=folder.parent).close()
        with _alone(folder, progress):
            prepared = _present(kind, folder, source, settings, progress)
            if prepared is None:
                prepared = _make(kind, folder, parts, source, settings, write, needed_bytes, progress)
            if to is not None:
                _point(kind, prepared)
            return prepared
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be written: {error_reason(error)}",
            "make room and run it again: it goes on from there; or choose another folder with --to"
            if error.errno in _NO_ROOM
            else "choose another folder with --to",
        ) from error


def interrupted_settings(kind: PreparedKind, source: Path) -> BuildSettings | None:
    """The settings of an interrupted run in the store that another one would go on with."""
    for journal in sorted((store_folder() / kind).glob(f"*.partial/{_JOURNAL}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(journal.read_text(encoding="utf-8"))
            if value["source"] == str(absolute_path(source)):
                return dict(value["settings"])
    return None


def _present(
    kind: PreparedKind, folder: Path, source: Path, settings: BuildSettings, progress: Progress | None
) -> PreparedModel | None:
    """What is there already, if it is what was asked for; what is damaged or stale is put away."""
    if not folder.exists():
        return None
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            return None
        raise OptionError(
            f"{folder} exists and holds something else",
            "delete it: edgespec makes its own there" if _in_store(folder) else _NAME_ANOTHER,
        )
    try:
        there = read_prepared(folder)
    except ModelFileError as error:
        if not _in_store(folder):
            # Who knows whose it is.
            raise OptionError(f"{folder} exists, and {error.what}", _NAME_ANOTHER) from error
        _put_away(folder)
        return None
    if (there.kind, there.source, dict(there.settings)) != (kind, source, dict(settings)):
        raise OptionError(
            f"{folder} holds what was prepared from {there.source} with other settings",
            "name another folder, or delete this one",
        )
    try:
        check_prepared(there, source)
        states = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("source_states")
        stale = not _unchanged(model_files(source), there.source_records, states, progress)
    except ModelFileError:
        stale = True
    if stale:
        ours = {MANIFEST, *(file.name for file in there.files)}
        foreign = [path for path in folder.iterdir() if path.name not in ours or path.is_dir()]
        if foreign and not _in_store(folder):
            raise OptionError(
                f"{folder} is damaged or stale, and holds {foreign[0].name}, which is not edgespec's",
                f"move that elsewhere, or {_NAME_ANOTHER}",
            )
        _put_away(folder)
        return None
    return there


def _put_away(folder: Path) -> None:
    """Delete a folder of ours, what says that it is ours last: a run that is killed meanwhile leaves that."""
    for path in folder.iterdir():
        if path.name != MANIFEST:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _in_store(folder: Path) -> bool:
    """Whether nobody but edgespec keeps anything there."""
    return folder.is_relative_to(absolute_path(store_folder()))


def _make(
    kind: PreparedKind,
    folder: Path,
    parts: list[Path],
    source: Path,
    settings: BuildSettings,
    write: Callable[[BuildFolder], Mapping[str, Any]],
    needed_bytes: int,
    progress: Progress | None,
) -> PreparedModel:
    partial = folder.with_name(f"{folder.name}.partial")
    journal = partial / _JOURNAL
    states = _states(parts)
    told = {"version": VERSION, "kind": kind, "source": str(source), "settings": dict(settings)}
    # Whoever was killed at the very end has left the manifest, which says the same and more.
    ours = next((path for path in (journal, partial / MANIFEST) if path.exists()), None)
    records, finished = _left_over(ours, parts, told, progress) if ours else (None, {})
    if records is None:
        foreign = partial.exists() and not ours and not _in_store(folder)
        if foreign and not all(path.name.startswith(_JOURNAL) for path in partial.iterdir()):
            raise OptionError(f"{partial} exists and holds something else", "name another folder")
        shutil.rmtree(partial, ignore_errors=True)
        finished = {}
    _check_room(folder.parent, needed_bytes - sum(file.size_bytes for file in finished.values()))
    if records is None:
        records = hash_files(parts, f"reading {source.name}", progress)
    partial.mkdir(exist_ok=True)

    def save() -> None:
        known = {"source_files": records, "source_states": states, "files": finished.values()}
        _write_json(journal, told | known)

    save()
    bench = BuildFolder(partial, source, finished, save)
    try:
        facts = write(bench)
    except CapabilityError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not _unchanged(parts, records, states, progress):
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelFileError(f"{source} changed while it was read", "run it again when it is at rest")
    prepared = PreparedModel(kind, folder, source, records, dict(settings), tuple(finished.values()), facts)
    manifest = told | {"source_files": records, "source_states": states, "files": prepared.files}
    for leftover in partial.iterdir():
        if leftover.name not in finished and leftover != journal:
            leftover.unlink()
    _write_json(partial / MANIFEST, manifest | {"facts": dict(facts)})
    journal.unlink()
    sync_to_disk(partial)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    return prepared


def _left_over(
    journal: Path, parts: list[Path], told: Mapping[str, Any], progress: Progress | None
) -> tuple[tuple[FileRecord, ...] | None, dict[str, FileRecord]]:
    """What an interrupted run knew and had finished; None when it made something else or cannot be read."""
    try:
        value = json.loads(journal.read_text(encoding="utf-8"))
        records = tuple(map(FileRecord.from_json, value["source_files"]))
        finished = {file.name: file for file in map(FileRecord.from_json, value["files"])}
        same = {name: value[name] for name in told} == told and len(records) == len(parts)
        states = value.get("source_states")
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None, {}
    return (records, finished) if same and _unchanged(parts, records, states, progress) else (None, {})


def _states(parts: list[Path]) -> list[list[int]]:
    """What whoever writes into a file changes of it, and which file it is."""
    known = [part.stat() for part in parts]
    return [[one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for one in known]


def _unchanged(
    parts: list[Path], records: tuple[FileRecord, ...], states: Any, progress: Progress | None
) -> bool:
    """Whether a source is what it was; all of it is read again where it may have been written to since."""
    if not all(map(matches_record, parts, records)):
        return False
    if _states(parts) == states:
        return True
    now = hash_files(parts, "reading the source again", progress)
    return [one.sha256 for one in now] == [one.sha256 for one in records]


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ModelFileError(
            f"{format_bytes(needed_bytes)} are needed in {folder} and {format_bytes(free_bytes)} are free",
            "free some space, or name a folder on another disk with --to",
        )


@contextmanager
def _alone(folder: Path, progress: Progress | None) -> Iterator[None]:
    """One run at a time makes this folder; others wait."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    while True:
        try:
            lock.acquire(timeout=_WAIT_SECONDS)
            break
        except Timeout:
            if progress and not progress("waiting for another run that prepares this", 0.0):
                raise CancelledError("waiting for another run was cancelled") from None
            time.sleep(_WAIT_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _point(kind: PreparedKind, prepared: PreparedModel) -> None:
    """Let `find` find a folder outside the store."""
    name = f"{_entry_name(prepared.source, prepared.settings)}.elsewhere"
    entry = store_folder() / kind / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    with replace_when_written(entry) as growing:
        growing.write_bytes(os.fsencode(prepared.folder))


def _entry_name(source: Path, settings: BuildSettings) -> str:
    told = json.dumps([str(source), dict(settings)], sort_keys=True)
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in source.stem)
    return f"{stem[:60]}-{sha256(told.encode()).hexdigest()[:12]}"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    def plain(part: Any) -> Any:
        return part.to_json() if isinstance(part, FileRecord) else list(part)

    with replace_when_written(path) as growing:
        growing.write_text(json.dumps(value, default=plain, indent=1) + "\n", encoding="utf-8")
