"""Models in other programs' stores, and a bounded search of their folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from edgespec.store.catalogue import ModelFormat

Store = Literal["embedded", "ollama", "lmstudio", "hub"]
# Maximum depth of the subfolders of a repository that are searched for models (chosen).
REPOSITORY_DEPTH = 3
# Maximum number of folder entries to read per store, which takes about a second. A larger folder is probably
# an entire disk.
_MAX_ENTRIES = 100_000
# Maximum number of folder entries to read below one symbolic link.
_MAX_LINKED_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine, and the program that stores it.

    Attributes:
        store: The program that stores the model. `hub` is the Hugging Face cache, and `embedded` is edgespec
            itself.
        names: References to the model, shortest first. The last reference is unique.
        path: The model's file or folder. None if the model is unusable.
        format: Name of the model's file format.
        problem: Why the model is unusable. Empty if it is usable.
        adapters: Adapters that are part of the model.
        projector: The projector (mmproj file) that is part of the model, or None.
        unused: Names of the model's parts that edgespec does not use, such as `system prompt`.
        sampling: Sampling settings that the program stores with the model, keyed by edgespec's names.
    """

    store: Store
    names: tuple[str, ...]
    path: Path | None
    format: ModelFormat = "gguf"
    problem: str = ""
    adapters: tuple[Path, ...] = ()
    projector: Path | None = None
    unused: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


def find_child(folder: Path, name: str) -> Path | None:
    """Return the entry named `name` in a folder, preferring an exact match over one that differs in case."""
    # Names come from requests, so they must not refer to anything outside the folder. On Windows, even `C:x`
    # does.
    if name in ("", ".") or Path(name).anchor or ".." in Path(name).parts:
        return None
    try:
        if (folder / name).exists():
            return folder / name
        with os.scandir(folder) as entries:
            near = sorted(entry.name for entry in entries if entry.name.lower() == name.lower())
    except (OSError, ValueError):
        return None
    return folder / near[0] if near else None


class EntryBudget:
    """A limit on the number of folder entries to read while searching for models.

    Attributes:
        left: Number of entries that may still be read. 0 or less once the limit has been exceeded.
        skipped: The first folder that was not searched because of a limit, or None.
    """

    def __init__(self, left: int | None = None) -> None:
        self.left = _MAX_ENTRIES if left is None else left
        self.skipped: Path | None = None

    def notice(self, store: Store) -> Iterator[StoredModel]:
        """Yield an entry that reports the problem if a folder was skipped because it has too many files."""
        if self.skipped is not None:
            problem = (
                f"the folder has too many files to search (limit: {_MAX_ENTRIES:,} in total,"
                f" {_MAX_LINKED_ENTRIES:,} under a symbolic link); some models may be missing from this list"
            )
            yield StoredModel(store, (str(self.skipped),), None, problem=problem)


def folders_in(folder: Path, budget: EntryBudget) -> list[Path]:
    """Return the subfolders of a folder, sorted by name. Symbolic links to folders are included."""
    return [Path(entry) for entry in _entries(folder, budget, budget) if _is_kind(entry, "folder")]


def files_below(
    folder: Path, depth: int, budget: EntryBudget, *, inside: Path | None = None
) -> Iterator[Path]:
    """Yield all regular files in a folder and its subfolders, sorted by name.

    Each folder is visited once. Hidden and unreadable entries are skipped, as are folders with too many
    entries.

    Args:
        folder: The folder to search.
        depth: Maximum depth of subfolders to search.
        budget: The number of folder entries that may still be read.
        inside: Ignore symbolic links that point outside this folder. If None, follow all links.
    """
    seen = set(_parents(folder))
    waiting = [(folder, depth, budget)]
    while waiting:
        here, levels, own_budget = waiting.pop()
        with suppress(OSError):
            if (identity := _identity(here.stat())) in seen:
                continue
            seen.add(identity)
        inner = []
        for entry in _entries(here, budget, own_budget):
            if entry.name.startswith("."):
                continue
            path = here / entry.name
            is_link = entry.is_symlink()
            if is_link and inside is not None and not is_inside(path, inside):
                continue
            if _is_kind(entry, "folder"):
                inner.append((path, EntryBudget(_MAX_LINKED_ENTRIES) if is_link else own_budget))
            elif _is_kind(entry, "file"):
                yield path
        if levels:
            waiting += [(path, levels - 1, inner_budget) for path, inner_budget in reversed(inner)]


def _entries(folder: Path, budget: EntryBudget, own_budget: EntryBudget) -> list[os.DirEntry[str]]:
    """Return a folder's entries sorted by name, or none if it is unreadable or has too many entries."""
    limit = max(0, min(budget.left, own_budget.left))
    try:
        with os.scandir(folder) as iterator:
            entries = list(islice(iterator, limit + 1))
    except OSError:
        return []
    for one in {budget, own_budget}:
        one.left -= len(entries)
    if len(entries) > limit:
        budget.skipped = budget.skipped or folder
        return []
    return sorted(entries, key=lambda entry: entry.name)


def _is_kind(entry: os.DirEntry[str], kind: Literal["file", "folder"]) -> bool:
    try:
        return entry.is_dir() if kind == "folder" else entry.is_file()
    except OSError:
        return False


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether `path` is in `folder`, after resolving symbolic links in both."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):
        return False


def is_parent(folder: Path, inner: Path) -> bool:
    """Return whether `folder` contains `inner`, after resolving symbolic links."""
    try:
        return _identity(folder.stat()) in set(_parents(inner))
    except OSError:
        return False


def _parents(folder: Path) -> Iterator[tuple[int, int]]:
    for parent in Path(os.path.realpath(folder)).parents:
        with suppress(OSError):
            yield _identity(parent.stat())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
