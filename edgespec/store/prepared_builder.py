"""Build prepared models, and create copies of models in another quantisation.

Only one process builds a model at a time. Files are written to a folder with the suffix `.partial`, which is
renamed when the build is complete. A folder without the suffix is therefore always complete. A journal of
finished files makes it possible to resume an interrupted build.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.errors import (
    CancelledError,
    CapabilityError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    OptionError,
)
from edgespec.model.base import Progress
from edgespec.store.prepared_files import (
    MANIFEST,
    VERSION,
    BuildSettings,
    FileRecord,
    PreparedModel,
    absolute_path,
    check_prepared,
    find_prepared,
    hash_files,
    matches_record,
    model_files,
    read_prepared,
    store_folder,
)
from edgespec.system.files import (
    error_reason,
    format_bytes,
    read_regular_file,
    replace_when_written,
    sync_to_disk,
    write_advice,
)

_JOURNAL = "journal.json"
_WAIT_SECONDS = 0.2
_USE_NEW_FOLDER = "choose a folder that does not exist yet"
# Prefix for the names of the temporary folders that conversions use.
_UNFINISHED = ".edgespec-"
# Age in seconds above which a temporary folder counts as abandoned. No conversion takes this long.
_STALE_SECONDS = 24 * 3600.0
_COPY = "copy.gguf"
# Free disk space in bytes that a copy needs beyond the size of the model. A copy can be slightly larger than
# the model, even if its type uses about the same number of bits per weight.
_EXTRA_BYTES = 16 << 20
# Smallest completed fraction from which the remaining time is estimated. Chosen.
_MIN_FRACTION = 0.05


class BuildFolder:
    """The folder of a prepared model while it is being built.

    Attributes:
        folder: The folder with the suffix `.partial`.
        source: Path of the source model.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        source: Path,
        settings: BuildSettings,
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder.with_name(f"{folder.name}.partial")
        self.source = source
        self._final_folder = folder
        self._journal = self.folder / _JOURNAL
        self._progress = progress
        identity = {"kind": kind, "source": str(source), "settings": dict(settings)}
        self._identity: dict[str, Any] = {"version": VERSION, **identity}
        self._parts = model_files(source)
        self._states = _file_states(self._parts)
        self._records: tuple[FileRecord, ...] = ()
        self._finished: dict[str, FileRecord] = {}

    def file(self, name: str, write: Callable[[Path], None]) -> Path:
        """Create the file `name` with `write`, unless it is already complete, and return its path."""
        path = self.folder / name
        if finished := self._finished.pop(name, None):
            with suppress(ModelFileError):
                if self._record(path) == finished:
                    self._finished[name] = finished
                    return path
        with replace_when_written(path) as temporary:
            write(temporary)
        self._finished[name] = self._record(path)
        self._save(self._journal)
        return path

    def build(
        self, write_files: Callable[[BuildFolder], Mapping[str, Any]], needed_bytes: int
    ) -> PreparedModel:
        """Write the files of the prepared model, except those already finished by an interrupted build.

        The folder gets its final name once all files are complete.
        """
        # A build interrupted at the very end leaves a manifest instead of a journal.
        journals = [path for path in (self._journal, self.folder / MANIFEST) if path.exists()]
        is_resumed = bool(journals) and self._resume(journals[0])
        if not is_resumed:
            self._delete_unusable(has_journal=bool(journals))
        needed_bytes -= sum(file.size_bytes for file in self._finished.values())
        free_bytes = shutil.disk_usage(self.folder.parent).free
        if needed_bytes > free_bytes:
            raise ModelFileError(
                f"preparing the model needs {format_bytes(needed_bytes)} of disk space, but only"
                f" {format_bytes(free_bytes)} is free in {self.folder.parent}",
                "free some space, or choose a folder on another disk with --to",
                code="disk_full",
            )
        if not is_resumed:
            self._records = hash_files(self._parts, f"reading {self.source.name}", self._progress)
        self.folder.mkdir(exist_ok=True)
        self._save(self._journal)
        try:
            facts = write_files(self)
        except CapabilityError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if not _is_unchanged(self._parts, self._records, self._states, self._progress):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ModelFileError(
                f"{self.source} changed while it was being read",
                "try again when no other program is writing to it",
                code="prepared_outdated",
            )
        for leftover in self.folder.iterdir():
            if leftover.name not in self._finished and leftover != self._journal:
                leftover.unlink()
        self._save(self.folder / MANIFEST, facts=dict(facts))
        self._journal.unlink()
        sync_to_disk(self.folder)
        self.folder.rename(self._final_folder)
        sync_to_disk(self._final_folder.parent)
        return read_prepared(self._final_folder)

    def _record(self, path: Path) -> FileRecord:
        return hash_files([path], f"checking {path.name}", self._progress)[0]

    def _save(self, path: Path, **more: Any) -> None:
        state = {
            "source_files": [asdict(record) for record in self._records],
            "source_states": self._states,
            "files": [asdict(record) for record in self._finished.values()],
        }
        with replace_when_written(path) as temporary:
            text = json.dumps(self._identity | state | more, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")

    def _resume(self, journal: Path) -> bool:
        """Load the state of an interrupted build. Return False if its files cannot be used."""
        try:
            value = json.loads(read_regular_file(journal).decode("utf-8"))
            if {name: value[name] for name in self._identity} != self._identity:
                return False
            records = tuple(map(FileRecord.from_json, value["source_files"]))
            finished = {file.name: file for file in map(FileRecord.from_json, value["files"])}
            states = value.get("source_states")
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return False
        if not _is_unchanged(self._parts, records, states, self._progress):
            return False
        self._records, self._finished = records, finished
        return True

    def _delete_unusable(self, *, has_journal: bool) -> None:
        if self.folder.exists() and not has_journal and not _in_store(self.folder):
            foreign = [path for path in self.folder.iterdir() if not path.name.startswith(_JOURNAL)]
            if foreign:
                raise OptionError(
                    f"{self.folder} already exists and contains files that edgespec did not create",
                    "choose another folder",
                    code="output_exists",
                )
        shutil.rmtree(self.folder, ignore_errors=True)


def build(
    kind: str,
    source: Path,
    settings: BuildSettings,
    write_files: Callable[[BuildFolder], Mapping[str, Any]],
    *,
    needed_bytes: int,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Build a prepared model, or return the existing one if it is intact.

    Afterwards, `find_prepared` returns this model.

    Args:
        kind: Kind of the prepared model.
        source: The model to build from.
        settings: Build settings. Together with `source`, they identify the build.
        write_files: Writes all files and returns facts for the manifest. If it raises CapabilityError, the
            partial folder is deleted. After any other error, the next build resumes with the finished files.
        needed_bytes: Free disk space required for the build.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Raises:
        ModelFileError: The source cannot be read, the folder cannot be written, or the disk is full.
        OptionError: `to` exists but does not contain this prepared model.
        CancelledError: `progress` returned False.
    """
    source = absolute_path(source)
    model_files(source)
    entry = store_folder() / kind / _entry_name(source, settings)
    folder = absolute_path(entry if to is None else to)
    if folder.is_symlink():
        if not folder.exists():
            raise OptionError(f"{folder} is a broken symbolic link", "delete it, or choose another folder")
        folder = folder.resolve()
    if not folder.name:
        raise OptionError(
            f"{folder} already exists, but is not a prepared model", _USE_NEW_FOLDER, code="output_exists"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Fail early if the folder is not writable. Otherwise, `_exclusive` would wait forever.
        tempfile.TemporaryFile(dir=folder.parent).close()
        with _exclusive(folder, progress):
            prepared = _existing(kind, folder, source, settings, progress)
            if prepared is None:
                build_folder = BuildFolder(kind, folder, source, settings, progress)
                prepared = build_folder.build(write_files, needed_bytes)
            elif to is None:
                # The user has just asked for this model. Update its timestamp, because `find_prepared`
                # returns the newest.
                with suppress(OSError):
                    os.utime(folder)
            if to is not None:
                _register(entry, folder)
            return prepared
    except OSError as error:
        raise ModelFileError(
            f"cannot write to {folder}: {error_reason(error)}",
            f"{write_advice(error, folder.parent, '--to')}, then prepare the model again to resume",
            code="file_not_written",
        ) from error


def _register(entry: Path, folder: Path) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with replace_when_written(entry.with_name(f"{entry.name}.elsewhere")) as temporary:
            temporary.write_bytes(os.fsencode(folder))
    except OSError as error:
        raise ModelFileError(
            f"the model in {folder} is prepared, but edgespec cannot record this in {entry.parent}:"
            f" {error_reason(error)}",
            f"{write_advice(error, entry.parent, 'EDGESPEC_CACHE_DIR')}, then prepare the model again",
            code="file_not_written",
        ) from error


def interrupted_settings(kind: str, source: Path) -> BuildSettings | None:
    """Return the settings of an interrupted build from `source`, or None if there is none."""
    for journal in sorted((store_folder() / kind).glob(f"*.partial/{_JOURNAL}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(read_regular_file(journal).decode("utf-8"))
            if value["source"] == str(absolute_path(source)):
                return dict(value["settings"])
    return None


def _existing(
    kind: str, folder: Path, source: Path, settings: BuildSettings, progress: Progress | None
) -> PreparedModel | None:
    """Return the prepared model in `folder` if it is intact. Delete it if it is damaged or outdated."""
    if not folder.exists():
        return None
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            return None
        raise OptionError(
            f"{folder} already exists, but is not a prepared model",
            "delete it, because edgespec stores prepared models there"
            if _in_store(folder)
            else _USE_NEW_FOLDER,
            code="output_exists",
        )
    try:
        existing = read_prepared(folder)
    except ModelFileError as error:
        if not _in_store(folder):
            raise OptionError(
                f"{folder} already exists, but cannot be used: {error.what}",
                _USE_NEW_FOLDER,
                code="output_exists",
            ) from error
        _delete(folder)
        return None
    if (existing.kind, existing.source, dict(existing.settings)) != (kind, source, dict(settings)):
        raise OptionError(
            f"{folder} was prepared from another model or with different settings (from {existing.source})",
            "choose another folder, or delete this one",
            code="output_exists",
        )
    try:
        check_prepared(existing, source)
        states = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("source_states")
        outdated = not _is_unchanged(model_files(source), existing.source_records, states, progress)
    except ModelFileError:
        outdated = True
    if outdated:
        own = {MANIFEST, *(file.name for file in existing.files)}
        foreign = [path for path in folder.iterdir() if path.name not in own or path.is_dir()]
        if foreign and not _in_store(folder):
            raise OptionError(
                f"{folder} is damaged or outdated, but contains {foreign[0].name},"
                " which edgespec did not create",
                f"move that file, or {_USE_NEW_FOLDER}",
                code="output_exists",
            )
        _delete(folder)
        return None
    return existing


def _delete(folder: Path) -> None:
    """Delete a prepared folder. The manifest is deleted last, so that interrupted deletions are detected."""
    for path in folder.iterdir():
        if path.name != MANIFEST:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _in_store(folder: Path) -> bool:
    return folder.is_relative_to(absolute_path(store_folder()))


def _file_states(parts: list[Path]) -> list[list[int]]:
    stats = [part.stat() for part in parts]
    return [[one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for one in stats]


def _is_unchanged(
    parts: list[Path], records: tuple[FileRecord, ...], states: Any, progress: Progress | None
) -> bool:
    """Return whether the source model is unchanged. Rehash whole files only if their timestamps differ."""
    if len(parts) != len(records) or not all(map(matches_record, parts, records)):
        return False
    if _file_states(parts) == states:
        return True
    current = hash_files(parts, "checking the original file again", progress)
    return [one.sha256 for one in current] == [one.sha256 for one in records]


@contextmanager
def _exclusive(folder: Path, progress: Progress | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_WAIT_SECONDS)
        except Timeout:
            if progress and not progress("waiting for another process that is preparing this model", 0.0):
                raise CancelledError("preparing the model was cancelled") from None
    try:
        yield
    finally:
        lock.release()


def _entry_name(source: Path, settings: BuildSettings) -> str:
    identity = json.dumps([str(source), dict(settings)], sort_keys=True)
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in source.stem)
    return f"{stem[:60]}-{sha256(os.fsencode(identity)).hexdigest()[:12]}"


def require_folder(folder: Path) -> None:
    """Raise ModelNotFoundError if the folder to convert does not exist."""
    if not folder.exists():
        raise ModelNotFoundError(f"there is no folder {folder}", "check the path")


def write_conversion(
    output: Path, what: str, convert: Callable[[Path], None], *, setting: str = "--to"
) -> int:
    """Convert a model to a file, and return the file's size in bytes.

    Args:
        output: The file to write. An existing file is replaced once the new one is complete.
        what: Description of the model, for error messages.
        convert: Writes the file to the given path.
        setting: The option or environment variable that determines the output folder, for error messages.

    Raises:
        EdgespecError: The file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=_UNFINISHED, dir=output.parent) as unfinished:
            path = Path(unfinished) / "converted.gguf"
            convert(path)
            size_bytes = path.stat().st_size
            path.replace(output)
    except OSError as error:
        raise EdgespecError(
            f"{what} cannot be converted to {output}: {error_reason(error)}",
            write_advice(error, output.parent, setting),
            code="file_not_written",
        ) from error
    return size_bytes


def delete_leftovers(folder: Path) -> None:
    """Delete the temporary folders left by conversions that were killed."""
    with suppress(OSError):
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            if leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def find_quantised(path: Path, type_name: str) -> Path | None:
    """Return the copy made by `prepare_quantised`, or None if it is missing or damaged."""
    prepared = find_prepared("quantised", path, {"type": type_name})
    try:
        if prepared is not None:
            check_prepared(prepared, path)
    except ModelFileError:
        return None
    return prepared.path(_COPY) if prepared is not None else None


def prepare_quantised(path: Path, type_name: str, progress: Progress | None = None) -> Path:
    """Create a copy of a GGUF model in another quantisation, or return the existing intact one.

    Args:
        path: The GGUF file.
        type_name: Quantisation type of the copy, such as Q4_0.
        progress: Reports progress while reading and writing.

    Returns:
        The copy's file in the store.

    Raises:
        ModelFileError: The model cannot be read, or the copy cannot be written.
        BackendError: llama.cpp failed.
        CancelledError: `progress` returned False.
    """
    from edgespec.backends.llamacpp.quantise import quantise

    started = time.monotonic()

    def report(_what: str, fraction: float) -> bool:
        # The first start of the chat shows this text to users who have not asked for a copy.
        what = f"making a smaller and faster copy of the model ({type_name}), which is needed only once"
        seconds = (time.monotonic() - started) * (1 - fraction) / max(fraction, _MIN_FRACTION)
        left = f"; about {math.ceil(seconds)} s left" if fraction >= _MIN_FRACTION else ""
        return progress is None or progress(what + left, fraction)

    def write_files(build_folder: BuildFolder) -> Mapping[str, Any]:
        build_folder.file(_COPY, lambda copy: quantise(build_folder.source, copy, type_name, report))
        return {}

    settings = {"type": type_name}
    needed_bytes = path.stat().st_size + _EXTRA_BYTES
    return build("quantised", path, settings, write_files, needed_bytes=needed_bytes, progress=progress).path(
        _COPY
    )
