"""The store of prepared files: a folder for each prepared thing, whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from edgespec.backends.gguf_files import gguf_files
from edgespec.errors import ModelFileError
from edgespec.files import cache_folder
from edgespec.prepare.file_records import FileRecord, hash_files, matches_record

__all__ = [
    "MANIFEST",
    "VERSION",
    "BuildSettings",
    "PreparedKind",
    "PreparedModel",
    "absolute_path",
    "check_prepared",
    "find_prepared",
    "list_prepared",
    "model_files",
    "read_prepared",
    "store_folder",
]

PreparedKind: TypeAlias = Literal["layerskip", "lowbit"]
BuildSettings: TypeAlias = Mapping[str, str | int]

MANIFEST = "edgespec.json"
VERSION = 1
_KINDS: tuple[PreparedKind, ...] = ("layerskip", "lowbit")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """One prepared thing: its folder and what the manifest says.

    source: the path of the model it was made from, `source_records` its files then (all parts when it was
    split). settings: what was asked for. facts: what was found out while it was made.
    """

    kind: PreparedKind
    folder: Path
    source: Path
    source_records: tuple[FileRecord, ...]
    settings: BuildSettings
    files: tuple[FileRecord, ...]
    facts: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(file.size_bytes for file in self.files)

    def path(self, name: str) -> Path:
        """The file of that name."""
        return self.folder / name


def store_folder() -> Path:
    """Where prepared things are kept: in `$EDGESPEC_CACHE_DIR`, or the platform's user cache folder."""
    return cache_folder() / "prepared"


def find_prepared(
    kind: PreparedKind, source: Path, settings: BuildSettings | None = None
) -> PreparedModel | None:
    """What was prepared from the model at `source`, with these settings or, for None, the newest.

    Neither the source nor the files are looked at: see `check`. A folder with a manifest that cannot be
    read counts as not there.
    """
    source = absolute_path(source)
    found = []
    for entry in _entries(kind):
        with suppress(ModelFileError, OSError):
            prepared = read_prepared(_followed(entry))
            if prepared.source == source and settings in (None, dict(prepared.settings)):
                found.append((entry.stat().st_mtime_ns, prepared.folder, prepared))
    return max(found)[2] if found else None


def list_prepared() -> list[PreparedModel]:
    """Everything that was prepared and whose manifest can be read, in the order of their folders."""
    found = []
    for kind in _KINDS:
        for entry in sorted(_entries(kind)):
            with suppress(ModelFileError, OSError):
                found.append(read_prepared(_followed(entry)))
    return found


def _entries(kind: PreparedKind) -> list[Path]:
    """Folders of the store, and files that say where a folder elsewhere is."""
    try:
        return [entry for entry in (store_folder() / kind).iterdir() if entry.suffix in ("", ".elsewhere")]
    except OSError:
        return []


def _followed(entry: Path) -> Path:
    return Path(os.fsdecode(entry.read_bytes())) if entry.suffix == ".elsewhere" else entry


def read_prepared(folder: Path) -> PreparedModel:
    """What the manifest of a prepared folder says. Raises ModelFileError when it is none of ours."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["version"] != VERSION:
            raise ModelFileError(
                f"{folder} was prepared in form {value['version']}, and this edgespec reads form {VERSION}",
                _again(folder),
            )
        if value["kind"] not in _KINDS:
            raise ValueError(f"kind {value['kind']!r}")
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
        raise ModelFileError(f"{path} cannot be read: {why}", _again(folder)) from error


def _again(folder: Path) -> str:
    return f"delete {folder} and run `edgespec prepare` again"


def check_prepared(prepared: PreparedModel, source: Path | None = None, *, full: bool = False) -> None:
    """Raises ModelFileError when a prepared file is damaged, or the source is not what it was made from.

    source: the model beside which it is to be used; None when the prepared files are used alone.
    full: read every byte; else sizes and a few blocks of each file are compared.
    """
    for file in prepared.files:
        path = prepared.path(file.name)
        if not path.is_file():
            raise ModelFileError(f"{path} is missing", _again(prepared.folder))
        whole = hash_files([path], "checking")[0] == file if full else matches_record(path, file)
        if not whole:
            raise ModelFileError(
                f"{path} is damaged: it is not the {file.size_bytes:,} bytes that were prepared",
                _again(prepared.folder),
            )
    if source is None:
        return
    parts, known = model_files(source), prepared.source_records
    changed = len(parts) != len(known) or not all(map(matches_record, parts, known))
    if changed or (full and [r.sha256 for r in hash_files(parts, "checking")] != [r.sha256 for r in known]):
        raise ModelFileError(
            f"{source} is no longer the file that {prepared.folder} was made from", _again(prepared.folder)
        )


def model_files(source: Path) -> list[Path]:
    """The files of a model: of a GGUF file, all parts; of a folder in which it was prepared, all there.

    Raises ModelFileError.
    """
    if not source.is_dir():
        return gguf_files(source)
    prepared = read_prepared(source)
    return [prepared.path(file.name) for file in prepared.files]


def absolute_path(path: Path) -> Path:
    """The path as it is told: from the root, with links left as they are."""
    return Path(os.path.abspath(os.path.expanduser(path)))
