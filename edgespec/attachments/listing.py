"""List the files in a folder, excluding those that Git ignores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

__all__ = ["Listing", "list_files"]

# Maximum number of files in a listing, and maximum time in seconds to create it. Listing 100,000 files takes
# about a second.
_MAX_FILES = 100_000
_MAX_SECONDS = 10.0
# Folders of generated files. Outside Git repositories, they are skipped, and so are hidden folders.
_GENERATED = ("__pycache__", "node_modules")
# A repository's settings can name any program as its file system monitor. `core.fsmonitor=false` stops Git
# from running that program.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
# If objects are missing, Git would fetch them, and a repository's settings can name any program for that.
# Older versions of Git do not read the first variable, but can then use no protocol.
_NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


class Listing(NamedTuple):
    """The files in a folder and its subfolders.

    Attributes:
        paths: Paths relative to the folder, with `/` between their parts, in alphabetical order.
        complete: False if the folder has more files than are listed.
    """

    paths: Sequence[str]
    complete: bool


def list_files(folder: Path) -> Listing:
    """List all files in a folder and its subfolders. Does not follow links to folders.

    Raises:
        OSError: The folder is unreadable.
    """
    with os.scandir(folder):
        pass  # Raise an error if the folder is unreadable. `os.walk` would ignore it.
    paths = _listed_by_git(folder)
    listing = _walk(folder) if paths is None else Listing(paths, len(paths) <= _MAX_FILES)
    return Listing(sorted(listing.paths[:_MAX_FILES]), listing.complete)


def _listed_by_git(folder: Path) -> list[str] | None:
    """Return the files that Git tracks or would add. Return None if Git cannot list them."""
    command = (*_GIT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **_NO_FETCH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_SECONDS,
            check=True,
        )
        return [os.fsdecode(path) for path in listed.stdout.split(b"\0") if path]
    return None


def _walk(folder: Path) -> Listing:
    deadline = monotonic() + _MAX_SECONDS
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        if len(paths) > _MAX_FILES or monotonic() > deadline:
            return Listing(paths, complete=False)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _GENERATED]
        inside = Path(parent).relative_to(folder)
        paths += ((inside / name).as_posix() for name in names if not name.startswith("."))
    return Listing(paths, len(paths) <= _MAX_FILES)
