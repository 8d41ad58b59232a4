"""Resolve a path, a folder or a glob pattern such as `src/**/*.py` to a list of files.

In folders, files that Git ignores are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from time import monotonic
from typing import NamedTuple

from edgespec.errors import AttachmentError
from edgespec.system.files import error_reason

__all__ = ["NoSuchFileError", "find_files", "list_files", "shown_path"]

# Maximum number of files that a folder or a pattern can add to a message.
_MAX_FILES = 500
_WILDCARDS = re.compile(r"[*?\[]")
# Maximum number of files in a listing, and maximum time in seconds to create it. Listing 100,000 files takes
# about a second.
_MAX_LISTED_FILES = 100_000
_MAX_LISTING_SECONDS = 10.0
# Folders of generated files. Outside Git repositories, these folders and hidden ones are skipped.
_GENERATED = ("__pycache__", "node_modules")
# Disable `core.fsmonitor`, because a repository's settings can make Git run any program as its file system
# monitor.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
# Keep Git from fetching missing objects, because a repository's settings can make it run any program to do
# so. Older Git versions ignore the first variable, so the second one disables all protocols.
_NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


class NoSuchFileError(AttachmentError):
    """Raised when a path does not exist, or no file matches a pattern."""

    code = "attachment_not_found"


def find_files(path: str) -> tuple[Path, ...]:
    """Return the files that `path` refers to: a single file, all files in a folder, or a pattern's matches.

    In patterns, `*` and `?` match within a file name, and `**` matches any number of folders. A path that
    exists is not a pattern, even if it contains these characters.

    Raises:
        NoSuchFileError: There is no such file.
        AttachmentError: There are too many files, or a folder is unreadable.
    """
    found = Path(os.path.expanduser(path))
    try:
        if os.path.lexists(found):
            return _matching(path, found, "**") if found.is_dir() else (found,)
    except (OSError, ValueError) as error:
        raise AttachmentError(
            f"{path} cannot be read: {error_reason(error)}", "check the path", code="attachment_unreadable"
        ) from error
    parts = found.parts
    first = next((place for place, part in enumerate(parts) if _WILDCARDS.search(part)), None)
    if first is None:
        raise NoSuchFileError(f"there is no file {path}", "check the path")
    return _matching(path, Path(*parts[:first]), *parts[first:])


def _matching(path: str, folder: Path, *pattern: str) -> tuple[Path, ...]:
    try:
        listing = list_files(folder)
    except OSError as error:
        raise AttachmentError(
            f"the folder {shown_path(folder)} cannot be read: {error_reason(error)}",
            "choose another folder",
            code="attachment_unreadable",
        ) from error
    if pattern[-1] == "**":
        pattern = (*pattern, "*")
    # Skip deleted files, which Git lists until their deletion is staged.
    found = [
        each
        for each in listing.paths
        if _matches(each.split("/"), pattern) and os.path.lexists(folder / each)
    ]
    smaller = "attach a smaller folder, or use a pattern such as @src/*.py"
    if len(found) > _MAX_FILES:
        raise AttachmentError(
            f"{path} contains {len(found):,} files, but at most {_MAX_FILES} can be attached",
            smaller,
            code="attachment_too_large",
        )
    if not listing.complete:
        raise AttachmentError(
            f"the folder {shown_path(folder)} contains too many files to search",
            smaller,
            code="attachment_too_large",
        )
    if not found:
        raise NoSuchFileError(f"{path} contains no files", "check the path")
    return tuple(folder / each for each in found)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    # Track all pattern positions reachable after each path part, because backtracking over every `**` would
    # take exponential time.
    matched = _skip_stars({0}, pattern)
    for part in parts:
        next_matched = set()
        for number in matched:
            if number < len(pattern) and pattern[number] == "**":
                next_matched.add(number)
            elif number < len(pattern) and fnmatchcase(part, pattern[number]):
                next_matched.add(number + 1)
        matched = _skip_stars(next_matched, pattern)
    return len(pattern) in matched


def _skip_stars(matched: set[int], pattern: Sequence[str]) -> set[int]:
    """Add the positions reachable by letting `**` match zero folders."""
    for number, part in enumerate(pattern):
        if part == "**" and number in matched:
            matched.add(number + 1)
    return matched


def shown_path(path: Path) -> str:
    """Return the path as shown to users and models: relative to the current or home directory if possible."""
    try:
        absolute, working = PurePath(os.path.abspath(path)), os.getcwd()
    except OSError:
        return _printable(str(path))  # The working folder has been deleted.
    for folder, prefix in ((working, ""), (os.path.expanduser("~"), "~/")):
        if absolute.is_relative_to(folder):
            shown = prefix + absolute.relative_to(folder).as_posix()
            break
    else:
        shown = str(absolute)
    return _printable(shown)


def _printable(name: str) -> str:
    # Replace line breaks and other control characters, which file names can contain.
    return "".join(character if character.isprintable() else "?" for character in name)


class Listing(NamedTuple):
    """The files in a folder and its subfolders.

    Attributes:
        paths: Paths relative to the folder, with `/` as the separator, in alphabetical order.
        complete: False if the folder has more files than are listed.
    """

    paths: Sequence[str]
    complete: bool


def list_files(folder: Path) -> Listing:
    """List all files in a folder and its subfolders. Symbolic links to folders are not followed.

    Raises:
        OSError: The folder is unreadable.
    """
    with os.scandir(folder):
        pass  # Raise an error if the folder is unreadable. `os.walk` would ignore it.
    paths = _listed_by_git(folder)
    listing = _walk(folder) if paths is None else Listing(paths, len(paths) <= _MAX_LISTED_FILES)
    return Listing(sorted(listing.paths[:_MAX_LISTED_FILES]), listing.complete)


def _listed_by_git(folder: Path) -> list[str] | None:
    """Return the files that Git tracks or would add, or None if Git cannot list them."""
    command = (*_GIT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **_NO_FETCH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_LISTING_SECONDS,
            check=True,
        )
        return [os.fsdecode(path) for path in listed.stdout.split(b"\0") if path]
    return None


def _walk(folder: Path) -> Listing:
    deadline = monotonic() + _MAX_LISTING_SECONDS
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        if len(paths) > _MAX_LISTED_FILES or monotonic() > deadline:
            return Listing(paths, complete=False)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _GENERATED]
        inside = Path(parent).relative_to(folder)
        paths += ((inside / name).as_posix() for name in names if not name.startswith("."))
    return Listing(paths, len(paths) <= _MAX_LISTED_FILES)
