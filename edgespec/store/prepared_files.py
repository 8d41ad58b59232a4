"""The store of prepared models, with one folder for each combination of model and settings.

The size and hash of each file are recorded, so that changes can be detected quickly.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from edgespec.errors import CancelledError, ModelFileError
from edgespec.model.base import Progress
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.system.files import cache_folder, read_regular_file, reading_model_files, sampled_sha256

_CHUNK_BYTES = 1 << 22


BuildSettings: TypeAlias = Mapping[str, str | int]

MANIFEST = "edgespec.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A prepared model, as described by the manifest in its folder.

    Attributes:
        kind: Kind of preparation: the name of the method that uses the model, or `quantised`.
        folder: Folder that contains the prepared model.
        source: Path of the source model.
        source_records: Records of the source model's files at build time.
        settings: Build settings.
        files: Records of the files in the folder.
        facts: Results of the build, such as measurements.
    """

    kind: str
    folder: Path
    source: Path
    source_records: tuple[FileRecord, ...]
    settings: BuildSettings
    files: tuple[FileRecord, ...]
    facts: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Total size of the prepared model's files in bytes."""
        return sum(file.size_bytes for file in self.files)

    def path(self, name: str) -> Path:
        """Return the path of a file in the prepared model's folder."""
        return self.folder / name


def store_folder() -> Path:
    """Return the folder for prepared models, in `$EDGESPEC_CACHE_DIR` or the user's cache folder."""
    return cache_folder() / "prepared"


def find_prepared(kind: str, source: Path, settings: BuildSettings | None = None) -> PreparedModel | None:
    """Return the newest model prepared from `source`, or None if there is none.

    The arguments are those of `find_all_prepared`.
    """
    return next(iter(find_all_prepared(kind, source, settings)), None)


def find_all_prepared(kind: str, source: Path, settings: BuildSettings | None = None) -> list[PreparedModel]:
    """Return all models prepared from `source`, newest first.

    The files are not checked (see `check_prepared`). Folders with an unreadable manifest are ignored.

    Args:
        kind: Kind of the prepared model.
        source: Path of the source model.
        settings: Build settings to match. If None, any settings match.
    """
    source = absolute_path(source)
    found = [
        (changed_ns, prepared.folder, prepared)
        for prepared, changed_ns in _prepared(kind)
        if prepared.source == source and settings in (None, dict(prepared.settings))
    ]
    return [prepared for *_, prepared in sorted(found, key=lambda each: each[:2], reverse=True)]


def list_prepared() -> list[PreparedModel]:
    """Return all prepared models that have a readable manifest, sorted by kind and folder."""
    kinds = sorted(folder.name for folder in store_folder().glob("*/"))
    return [prepared for kind in kinds for prepared, _ in _prepared(kind)]


def _prepared(kind: str) -> Iterator[tuple[PreparedModel, int]]:
    for entry in sorted((store_folder() / kind).glob("*")):
        with suppress(ModelFileError, OSError):
            # A file with this suffix contains the path of a prepared model in another folder.
            if entry.suffix == ".elsewhere":
                yield read_prepared(Path(os.fsdecode(read_regular_file(entry)))), entry.stat().st_mtime_ns
            elif not entry.suffix:
                yield read_prepared(entry), entry.stat().st_mtime_ns


def read_prepared(folder: Path) -> PreparedModel:
    """Read a prepared folder's manifest.

    Raises:
        ModelFileError: The folder has no valid manifest.
    """
    path = folder / MANIFEST
    try:
        value = json.loads(read_regular_file(path).decode("utf-8"))
        if value["version"] != VERSION:
            raise ModelFileError(
                f"{folder} has format version {value['version']},"
                f" but this version of edgespec reads version {VERSION}",
                _rebuild_hint(folder),
                code="prepared_outdated",
            )
        if not isinstance(value["kind"], str):
            raise TypeError(f"it describes an unknown kind of model: {value['kind']!r}")
        return PreparedModel(
            value["kind"],
            folder,
            Path(value["source"]),
            tuple(map(FileRecord.from_json, value["source_files"])),
            MappingProxyType(dict(value["settings"])),
            tuple(map(FileRecord.from_json, value["files"])),
            MappingProxyType(dict(value["facts"])),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelFileError(
            f"{path} cannot be read: {why}", _rebuild_hint(folder), code="prepared_outdated"
        ) from error


def _rebuild_hint(folder: Path) -> str:
    return f"delete {folder} and run `edgespec prepare` again"


def check_prepared(prepared: PreparedModel, source: Path | None = None, *, full: bool = False) -> None:
    """Check that the files of a prepared model are intact and that its source has not changed.

    Args:
        prepared: The prepared model.
        source: Source model to check for changes. If None, only the prepared files are checked.
        full: Whether to hash whole files instead of comparing only the size and a few blocks of each.

    Raises:
        ModelFileError: A file is missing or damaged, or the source has changed.
    """
    for file in prepared.files:
        path = prepared.path(file.name)
        if not path.is_file():
            raise ModelFileError(
                f"{path} is missing", _rebuild_hint(prepared.folder), code="prepared_outdated"
            )
        intact = hash_files([path], "checking")[0] == file if full else matches_record(path, file)
        if not intact:
            raise ModelFileError(
                f"{path} is damaged or was changed after it was prepared",
                _rebuild_hint(prepared.folder),
                code="prepared_outdated",
            )
    if source is None:
        return
    parts, records = model_files(source), prepared.source_records
    changed = len(parts) != len(records) or not all(map(matches_record, parts, records))
    if changed or (full and [r.sha256 for r in hash_files(parts, "checking")] != [r.sha256 for r in records]):
        raise ModelFileError(
            f"{source} has changed since {prepared.folder} was prepared from it",
            _rebuild_hint(prepared.folder),
            code="prepared_outdated",
        )


def model_files(source: Path) -> list[Path]:
    """Return all files of a model: the parts of a GGUF model, or the files in a prepared folder.

    Raises:
        ModelFileError: The model cannot be read.
    """
    if not source.is_dir():
        return gguf_files(source)
    prepared = read_prepared(source)
    return [prepared.path(file.name) for file in prepared.files]


def absolute_path(path: Path) -> Path:
    """Return the absolute path without resolving symbolic links."""
    return Path(os.path.abspath(os.path.expanduser(path)))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and hashes of a file, for detecting later changes.

    Attributes:
        name: File name without its folder.
        size_bytes: Size of the file in bytes.
        sha256: SHA-256 hash of the file.
        sample: SHA-256 hash of a few sampled blocks. See `sampled_sha256`.
    """

    name: str
    size_bytes: int
    sha256: str
    sample: str

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Create a record from a JSON object. Raises KeyError, TypeError or ValueError if it is invalid."""
        name, size = value["name"], value["size_bytes"]
        if not isinstance(name, str) or not isinstance(size, int) or name != os.path.basename(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return cls(name, size, str(value["sha256"]), str(value["sample"]))


def hash_files(paths: Sequence[Path], what: str, progress: Progress | None = None) -> tuple[FileRecord, ...]:
    """Hash whole files and return a record of each.

    Args:
        paths: The files.
        what: Description of the task, which is passed to `progress`.
        progress: Called with the fraction of bytes read so far.

    Raises:
        ModelFileError: A file cannot be read.
        CancelledError: `progress` returned False.
    """
    done_bytes, records = 0, []
    with reading_model_files(paths[0]):
        sizes = [path.stat().st_size for path in paths]
        for path, size_bytes in zip(paths, sizes, strict=True):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    done_bytes += len(chunk)
                    if progress and not progress(what, min(1.0, done_bytes / sum(sizes))):
                        raise CancelledError(f"{what} was cancelled")
            records.append(FileRecord(path.name, size_bytes, digest.hexdigest(), sampled_sha256(path)))
    return tuple(records)


def matches_record(path: Path, record: FileRecord) -> bool:
    """Return whether a file's size and a few of its blocks match its record.

    Raises:
        ModelFileError: The file cannot be read.
    """
    with reading_model_files(path):
        return path.stat().st_size == record.size_bytes and sampled_sha256(path) == record.sample
