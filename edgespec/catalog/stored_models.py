"""A model that some program keeps on this machine, and looking for such without being led astray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.catalog.catalogue import ModelFormat
from edgespec.catalog.hub_files import HubFile, is_model_file

__all__ = ["GgufModel", "Store", "StoredModel", "files_below", "find_child", "group_gguf_files", "holds"]

Store = Literal["ollama", "lmstudio", "hub"]
# A shelf of this many files is somebody's whole disk.
_MOST_ENTRIES = 100_000
# A link that leads to so many leads to no model.
_MOST_LINKED_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in another program's store.

    names: references it may be called by, shortest first; nothing else is called by the last of them.
    path: as in `Resolved`; None where the model cannot be used, for the reason `problem`.
    """

    store: Store
    names: tuple[str, ...]
    path: Path | None
    format: ModelFormat = "gguf"
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The files of one GGUF model, all parts in order, by their paths below a folder."""

    files: tuple[HubFile, ...]

    @property
    def whole(self) -> bool:
        """Whether all its parts are there."""
        return len(self.files) == self.files[0].part_count


def group_gguf_files(files: Sequence[HubFile]) -> list[GgufModel]:
    """The GGUF models that some files make up; projectors and the like are none."""
    models: dict[str, list[HubFile]] = {}
    for file in sorted(filter(is_model_file, files), key=lambda file: file.name):
        models.setdefault(file.stem, []).append(file)
    return [GgufModel(tuple(parts)) for parts in models.values()]


def find_child(folder: Path, name: str) -> Path | None:
    """What is called `name` in a folder, in this or, where there is none, in another case."""
    if name in ("", ".", ".."):
        return None
    try:
        if (folder / name).exists():
            return folder / name
        with os.scandir(folder) as found:
            near = sorted(entry.name for entry in found if entry.name.lower() == name.lower())
    except (OSError, ValueError):
        return None
    return folder / near[0] if near else None


def files_below(folder: Path, depth: int) -> Iterator[Path]:
    """The files in a folder and the folders in it, `depth` levels of these, in the order of their names.

    Links are followed, for models may lie on another disk; each folder is entered once, and none that holds
    `folder` itself. What cannot be read, or is hidden, is passed over.
    """
    seen = set(_around(folder))
    whole = _Allowance(_MOST_ENTRIES)
    waiting = [(folder, depth, whole)]
    while waiting:
        here, levels, allowance = waiting.pop()
        if min(whole.left, allowance.left) < 0:
            continue
        try:
            if (identity := _identity(here.stat())) in seen:
                continue
            seen.add(identity)
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        for one in {whole, allowance}:
            one.left -= len(entries)
        if min(whole.left, allowance.left) < 0:
            continue
        inner = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = here / entry.name
            try:
                if entry.is_dir():
                    inner.append(
                        (path, _Allowance(_MOST_LINKED_ENTRIES) if entry.is_symlink() else allowance)
                    )
                elif entry.is_file():
                    yield path
            except OSError:
                continue
        if levels:
            waiting += [(path, levels - 1, allowed) for path, allowed in reversed(inner)]


def holds(folder: Path, inner: Path) -> bool:
    """Whether a folder, by whatever links, is one that `inner` lies in."""
    try:
        return _identity(folder.stat()) in set(_around(inner))
    except OSError:
        return False


class _Allowance:
    """How many entries of folders may still be looked at; below 0 more were wanted."""

    def __init__(self, left: int) -> None:
        self.left = left


def _around(folder: Path) -> Iterator[tuple[int, int]]:
    """The folders that a folder lies in."""
    for around in Path(os.path.realpath(folder)).parents:
        with suppress(OSError):
            yield _identity(around.stat())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
