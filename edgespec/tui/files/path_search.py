"""Find paths to offer as completions.

Inside the working folder, a path matches if it contains the typed letters in order. Elsewhere, only the
entries of the typed folder are searched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import nsmallest
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic

from edgespec.attachments.finding import list_files

__all__ = ["PathSearch"]

_MAX_FOUND = 50
# Seconds after which the list of files in the working folder is read again.
_LISTING_SECONDS = 10.0
# Maximum number of entries to read from a folder outside the working folder.
_MAX_ENTRIES = 2_000


class PathSearch:
    """Finds paths for completion. Folder paths end with `/`. Searching a large folder can take seconds."""

    def __init__(self) -> None:
        self._paths: Sequence[str] = ()
        self._listed_at = -_LISTING_SECONDS
        self._folder = ""

    def find(self, typed: str) -> list[str]:
        """Return the paths that start with `typed` or contain its letters in order, best match first."""
        if re.search(r"[*?]", typed):
            return []
        if os.path.isabs(typed) or typed.startswith(("~", "./", "..")):
            return _entries(typed)
        return _ranked(self._listed(), typed)

    def _listed(self) -> Sequence[str]:
        """Return all files and folders inside the working folder."""
        try:
            folder = os.getcwd()
        except OSError:
            return ()  # The folder has been deleted.
        if folder != self._folder or monotonic() - self._listed_at > _LISTING_SECONDS:
            files: Sequence[str] = ()
            with suppress(OSError):
                files = list_files(Path(folder)).paths
            folders = {f"{parent}/" for path in files for parent in PurePosixPath(path).parents}
            self._paths = [*sorted(folders - {"./"}), *files]
            self._folder, self._listed_at = folder, monotonic()
        return self._paths


def _entries(typed: str) -> list[str]:
    """Return the entries of the typed folder whose names match the text after its last `/`."""
    parent, slash, name = typed.rpartition("/")
    if not slash:
        return [f"{typed}/"] if typed in ("~", "..") else []
    with suppress(OSError), os.scandir(os.path.expanduser(f"{parent}/")) as entries:
        names = [
            f"{entry.name}/" if entry.is_dir() else entry.name for entry in islice(entries, _MAX_ENTRIES)
        ]
        shown = (each for each in names if name.startswith(".") or not each.startswith("."))
        return [f"{parent}/{each}" for each in _ranked(shown, name)]
    return []


def _ranked(paths: Iterable[str], typed: str) -> list[str]:
    sought = typed.casefold()
    ranks = ((_rank(path, sought), path) for path in paths)
    return [path for _, path in nsmallest(_MAX_FOUND, (each for each in ranks if each[0]))]


def _rank(path: str, sought: str) -> tuple[object, ...]:
    """Return a value that is smaller the better the path matches. Empty if the path does not match."""
    folded = path.casefold()
    # The letters are sought one by one. A regular expression could take exponential time.
    first = place = -1
    for letter in sought:
        place = folded.find(letter, place + 1)
        if place < 0:
            return ()
        first = place if first < 0 else first
    name = folded.rstrip("/").rpartition("/")[2]
    return (
        not folded.startswith(sought),
        not name.startswith(sought),
        sought not in name,
        place - first,
        path.rstrip("/").count("/"),
        len(path),
        path,
    )
