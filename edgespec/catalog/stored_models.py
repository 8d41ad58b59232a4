"""Models in other programs' stores, and a bounded search of their folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.catalog.catalogue import ModelFormat

__all__ = ["Store", "StoredModel", "files_below", "find_child", "is_parent"]

Store = Literal["embedded", "ollama", "lmstudio", "hub"]
# Maximum number of folder entries that a search reads. A larger folder is probably a whole disk.
_MAX_ENTRIES = 100_000
# Maximum number of entries to read below one symbolic link. A larger folder probably contains no models.
_MAX_LINKED_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in another program's store.

    Attributes:
        store: The program that stores it. `hub` is the Hugging Face cache; `embedded` is edgespec itself.
        names: References to the model, shortest first. The last one is unique.
        path: Its file or folder. None if the model is unusable.
        format: Name of its file format.
        problem: Why the model is unusable. Empty if it is usable.
    """

    store: Store
    names: tuple[str, ...]
    path: Path | None
    format: ModelFormat = "gguf"
    problem: str = ""


def find_child(folder: Path, name: str) -> Path | None:
    """Return the entry named `name` in a folder. Prefers an exact match over one that differs in case."""
    if name in ("", ".", ".."):
        return None
    try:
        if (folder / name).exists():
            return folder / name
        with os.scandir(folder) as entries:
            near = sorted(entry.name for entry in entries if entry.name.lower() == name.lower())
    except (OSError, ValueError):
        return None
    return folder / near[0] if near else None


def files_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders, sorted by name.

    The search follows symbolic links, because models may be on another disk. It visits each
    folder once, never visits a parent of `folder`, and skips hidden and unreadable entries.

    Args:
        folder: The folder to search.
        depth: Maximum depth of subfolders to search.
    """
    seen = set(_parents(folder))
    total = _EntryBudget(_MAX_ENTRIES)
    waiting = [(folder, depth, total)]
    while waiting:
        here, levels, budget = waiting.pop()
        if min(total.left, budget.left) < 0:
            continue
        try:
            if (identity := _identity(here.stat())) in seen:
                continue
            seen.add(identity)
            with os.scandir(here) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError:
            continue
        for one in {total, budget}:
            one.left -= len(entries)
        if min(total.left, budget.left) < 0:
            continue
        inner = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = here / entry.name
            try:
                if entry.is_dir():
                    inner.append((path, _EntryBudget(_MAX_LINKED_ENTRIES) if entry.is_symlink() else budget))
                elif entry.is_file():
                    yield path
            except OSError:
                continue
        if levels:
            waiting += [(path, levels - 1, inner_budget) for path, inner_budget in reversed(inner)]


def is_parent(folder: Path, inner: Path) -> bool:
    """Return whether `folder` contains `inner`, after resolving symbolic links."""
    try:
        return _identity(folder.stat()) in set(_parents(inner))
    except OSError:
        return False


class _EntryBudget:
    """Number of folder entries that a search may still read. Negative once the limit is exceeded."""

    def __init__(self, left: int) -> None:
        self.left = left


def _parents(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the (device, inode) of each parent folder."""
    for parent in Path(os.path.realpath(folder)).parents:
        with suppress(OSError):
            yield _identity(parent.stat())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
