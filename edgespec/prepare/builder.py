"""Build prepared models. Only one process builds a model at a time; interrupted builds can be resumed.

Files are written to a folder with the suffix `.partial`, which is renamed when the build is complete. A
folder without the suffix is therefore always complete. A journal lists the finished files, so that an
interrupted build can be resumed.
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

__all__ = ["BuildFolder", "build", "interrupted_settings"]

_JOURNAL = "journal.json"
_WAIT_SECONDS = 0.2
_DISK_FULL_ERRORS = (ENOSPC, EDQUOT, EFBIG, EIO)
_USE_NEW_FOLDER = "choose a folder that does not exist"


class BuildFolder:
    """The folder of a prepared model while it is being built.

    Attributes:
        folder: The partial folder.
        source: Path of the source model.
    """

    def __init__(
        self, folder: Path, source: Path, finished: dict[str, FileRecord], save: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.source = source
        self._finished = finished
        self._save = save

    def file(self, name: str, write: Callable[[Path], None], progress: Progress | None = None) -> Path:
        """Return the path of the file `name`, and write the file unless an earlier build finished it.

        Args:
            name: Name of the file.
            write: Writes the file to the given path.
            progress: Reports progress while hashing the file.
        """
        path = self.folder / name
        finished = self._finished.get(name)
        if finished is not None:
            with suppress(ModelFileError):
                if hash_files([path], f"checking {name}", progress)[0] == finished:
                    return path
            del self._finished[name]
        with replace_when_written(path) as temporary:
            write(temporary)
        self._finished[name] = hash_files([path], f"checking {name}", progress)[0]
        self._save()
        return path


def build(
    kind: PreparedKind,
    source: Path,
    settings: BuildSettings,
    write_files: Callable[[BuildFolder], Mapping[str, Any]],
    *,
    needed_bytes: int,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Build a prepared model, or return the existing one if it is intact.

    Args:
        kind: Kind of the prepared model.
        source: The model to build from.
        settings: Build settings. Together with `source`, they identify the build.
        write_files: Writes all files and returns facts for the manifest. If it raises CapabilityError, the
            partial folder is deleted; after any other error, the next build resumes with the finished files.
        needed_bytes: Free disk space required for the build.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Raises:
        ModelFileError: The source cannot be read, the folder cannot be written, or the disk is full.
        OptionError: `to` exists but does not contain this prepared model.
        CancelledError: `progress` returned False.
    """
    source = absolute_path(source)
    parts = model_files(source)
    entry = store_folder() / kind / _entry_name(source, settings)
    folder = absolute_path(entry if to is None else to)
    if folder.is_symlink():
        if not folder.exists():
            raise OptionError(f"{folder} is a broken symbolic link", "delete it, or choose another folder")
        folder = folder.resolve()
    if not folder.name:
        raise OptionError(f"{folder} exists and is not a prepared model", _USE_NEW_FOLDER)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If the folder is not writable, acquiring the lock below would wait forever, so fail here.
        tempfile.TemporaryFile(dir=folder.parent).close()
        with _exclusive(folder, progress):
            prepared = _existing(kind, folder, source, settings, progress)
            if prepared is None:
                prepared = _build(kind, folder, parts, source, settings, write_files, needed_bytes, progress)
            if to is not None:
                _register(kind, prepared)
            return prepared
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be written: {error_reason(error)}",
            "free disk space and run it again to resume, or choose another folder with --to"
            if error.errno in _DISK_FULL_ERRORS
            else "choose another folder with --to",
        ) from error


def interrupted_settings(kind: PreparedKind, source: Path) -> BuildSettings | None:
    """Return the settings of an interrupted build in the store, or None if there is none."""
    for journal in sorted((store_folder() / kind).glob(f"*.partial/{_JOURNAL}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(journal.read_text(encoding="utf-8"))
            if value["source"] == str(absolute_path(source)):
                return dict(value["settings"])
    return None


def _existing(
    kind: PreparedKind, folder: Path, source: Path, settings: BuildSettings, progress: Progress | None
) -> PreparedModel | None:
    """Return the prepared model in `folder` if it is intact. Delete it if it is damaged or outdated."""
    if not folder.exists():
        return None
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            return None
        raise OptionError(
            f"{folder} exists and is not a prepared model",
            "delete it, because edgespec stores prepared models there"
            if _in_store(folder)
            else _USE_NEW_FOLDER,
        )
    try:
        existing = read_prepared(folder)
    except ModelFileError as error:
        if not _in_store(folder):
            # The folder may belong to another program, so do not delete it.
            raise OptionError(f"{folder} exists, and {error.what}", _USE_NEW_FOLDER) from error
        _delete(folder)
        return None
    if (existing.kind, existing.source, dict(existing.settings)) != (kind, source, dict(settings)):
        raise OptionError(
            f"{folder} was prepared from {existing.source} with other settings",
            "choose another folder, or delete this one",
        )
    try:
        check_prepared(existing, source)
        states = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("source_states")
        outdated = not _unchanged(model_files(source), existing.source_records, states, progress)
    except ModelFileError:
        outdated = True
    if outdated:
        own = {MANIFEST, *(file.name for file in existing.files)}
        foreign = [path for path in folder.iterdir() if path.name not in own or path.is_dir()]
        if foreign and not _in_store(folder):
            raise OptionError(
                f"{folder} is damaged or outdated, and edgespec did not create {foreign[0].name} in it",
                f"move that file, or {_USE_NEW_FOLDER}",
            )
        _delete(folder)
        return None
    return existing


def _delete(folder: Path) -> None:
    """Delete a prepared folder. Delete the manifest last, so that interrupted deletions are detectable."""
    for path in folder.iterdir():
        if path.name != MANIFEST:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _in_store(folder: Path) -> bool:
    """Return whether the folder is in the store, where only edgespec writes."""
    return folder.is_relative_to(absolute_path(store_folder()))


def _build(
    kind: PreparedKind,
    folder: Path,
    parts: list[Path],
    source: Path,
    settings: BuildSettings,
    write_files: Callable[[BuildFolder], Mapping[str, Any]],
    needed_bytes: int,
    progress: Progress | None,
) -> PreparedModel:
    partial = folder.with_name(f"{folder.name}.partial")
    journal = partial / _JOURNAL
    states = _file_states(parts)
    header = {"version": VERSION, "kind": kind, "source": str(source), "settings": dict(settings)}
    # If a build was interrupted just after deleting the journal, use the manifest, which has the same
    # entries.
    existing = next((path for path in (journal, partial / MANIFEST) if path.exists()), None)
    records, finished = _resume(existing, parts, header, progress) if existing else (None, {})
    if records is None:
        foreign = partial.exists() and not existing and not _in_store(folder)
        if foreign and not all(path.name.startswith(_JOURNAL) for path in partial.iterdir()):
            raise OptionError(f"{partial} exists and is not an interrupted build", "choose another folder")
        shutil.rmtree(partial, ignore_errors=True)
        finished = {}
    _check_room(folder.parent, needed_bytes - sum(file.size_bytes for file in finished.values()))
    if records is None:
        records = hash_files(parts, f"reading {source.name}", progress)
    partial.mkdir(exist_ok=True)

    def save() -> None:
        state = {"source_files": records, "source_states": states, "files": finished.values()}
        _write_json(journal, header | state)

    save()
    build_folder = BuildFolder(partial, source, finished, save)
    try:
        facts = write_files(build_folder)
    except CapabilityError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not _unchanged(parts, records, states, progress):
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelFileError(
            f"{source} changed while it was read", "run it again when no other program writes to it"
        )
    prepared = PreparedModel(kind, folder, source, records, dict(settings), tuple(finished.values()), facts)
    manifest = header | {"source_files": records, "source_states": states, "files": prepared.files}
    for leftover in partial.iterdir():
        if leftover.name not in finished and leftover != journal:
            leftover.unlink()
    _write_json(partial / MANIFEST, manifest | {"facts": dict(facts)})
    journal.unlink()
    sync_to_disk(partial)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    return prepared


def _resume(
    journal: Path, parts: list[Path], header: Mapping[str, Any], progress: Progress | None
) -> tuple[tuple[FileRecord, ...] | None, dict[str, FileRecord]]:
    """Return an interrupted build's source records and finished files; (None, {}) if not reusable."""
    try:
        value = json.loads(journal.read_text(encoding="utf-8"))
        records = tuple(map(FileRecord.from_json, value["source_files"]))
        finished = {file.name: file for file in map(FileRecord.from_json, value["files"])}
        same = {name: value[name] for name in header} == header and len(records) == len(parts)
        states = value.get("source_states")
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None, {}
    return (records, finished) if same and _unchanged(parts, records, states, progress) else (None, {})


def _file_states(parts: list[Path]) -> list[list[int]]:
    """Return the identity, size and timestamps of files, which change when a file is replaced or written."""
    stats = [part.stat() for part in parts]
    return [[one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for one in stats]


def _unchanged(
    parts: list[Path], records: tuple[FileRecord, ...], states: Any, progress: Progress | None
) -> bool:
    """Return whether the source is unchanged. Hash it again if its file timestamps have changed."""
    if not all(map(matches_record, parts, records)):
        return False
    if _file_states(parts) == states:
        return True
    current = hash_files(parts, "reading the source again", progress)
    return [one.sha256 for one in current] == [one.sha256 for one in records]


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ModelFileError(
            f"{folder} needs {format_bytes(needed_bytes)} of free space but has {format_bytes(free_bytes)}",
            "free disk space, or choose a folder on another disk with --to",
        )


@contextmanager
def _exclusive(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Hold a lock on a folder, so that only one process builds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    while True:
        try:
            lock.acquire(timeout=_WAIT_SECONDS)
            break
        except Timeout:
            if progress and not progress("waiting for another process that prepares this model", 0.0):
                raise CancelledError("waiting for another process was cancelled") from None
            time.sleep(_WAIT_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _register(kind: PreparedKind, prepared: PreparedModel) -> None:
    """Register a folder outside the store, so that `find_prepared` can find it."""
    name = f"{_entry_name(prepared.source, prepared.settings)}.elsewhere"
    entry = store_folder() / kind / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    with replace_when_written(entry) as temporary:
        temporary.write_bytes(os.fsencode(prepared.folder))


def _entry_name(source: Path, settings: BuildSettings) -> str:
    identity = json.dumps([str(source), dict(settings)], sort_keys=True)
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in source.stem)
    return f"{stem[:60]}-{sha256(identity.encode()).hexdigest()[:12]}"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    def plain(part: Any) -> Any:
        return part.to_json() if isinstance(part, FileRecord) else list(part)

    with replace_when_written(path) as temporary:
        temporary.write_text(json.dumps(value, default=plain, indent=1) + "\n", encoding="utf-8")
