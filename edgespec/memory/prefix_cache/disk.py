"""Pieces of texts on disk: one private file each, read with suspicion, bounded by a quota.

A file says what made it (see `identity`), which tokens it holds, after which file it goes, and what its bytes
must sum to. Whatever differs is not used, and read again by the model instead. A file is written beside its
place and moved there whole, by one process at a time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
from filelock import FileLock, Timeout

from edgespec.backends.base import Snapshot
from edgespec.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    regular_file_bytes,
    touch_private,
    write_private_file,
)
from edgespec.memory.prefix_cache.headers import packed, read_header, sums_of
from edgespec.memory.prefix_cache.segments import Tokens

__all__ = ["PrefixCacheDisk", "StoredSegment", "default_disk_bytes", "delete_cached_prefixes", "kept_folder"]

_SUFFIX = ".kept"
_LOCK_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
# Its time says when all was forgotten last.
_FORGOTTEN = "forgotten"
_MOST_BYTES = 4 * 2**30
_SHARE_OF_FREE = 0.1
# What was used a moment ago and what was used just now are worth the same.
_FRESH_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """What a file tells before its bytes are read.

    after: the digest of the text before it, which is the beginning of that file's name; empty where a text
    begins. seconds: what reading its tokens took the model. used: when, in seconds of the wall clock.
    """

    name: str
    after: str
    start: int
    tokens: Tokens
    data_bytes: int
    seconds: float
    used: float


def kept_folder() -> Path:
    """Where the files are, in a folder for each model and way of running it."""
    return data_folder() / "kept"


def default_disk_bytes(folder: Path | None = None) -> int:
    """The bytes that may be kept on disk unless the user says: 4 GiB, or a tenth of what is free if less."""
    folder = folder or kept_folder()
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free + sum(_size(path) for path in _files(folder))
    except OSError:
        return 0
    return min(_MOST_BYTES, int(free * _SHARE_OF_FREE))


class PrefixCacheDisk:
    """The files of one model, loaded in one way. It never raises for what is wrong there: see `notice`.

    identity: tells apart whatever could make another state of the same tokens: the weights, the backend and
    its version, how it stores and computes. quota_bytes: for all models together.
    """

    def __init__(self, identity: str, quota_bytes: int | None = None, folder: Path | None = None) -> None:
        self._root = folder or kept_folder()
        self.folder = self._root / identity[:32]
        self.quota_bytes = default_disk_bytes(self._root) if quota_bytes is None else quota_bytes
        self.notice = ""
        self._identity = identity
        self._forgotten_ns = self._last_forgotten_ns()

    def stored(self) -> list[StoredSegment]:
        """What is there, each after what it goes after; a file nobody can use is deleted.

        What is more than the quota by now is deleted before.
        """
        if self.used_bytes() > self.quota_bytes:
            with suppress(OSError, Timeout, NotImplementedError), self._lock():
                self._make_room(0, set())
        found: dict[str, StoredSegment] = {}
        for path in _files(self.folder):
            piece = self._told(path)
            if piece:
                found[piece.name] = piece
            else:
                _delete(path)
        # A text's digest, and how long it is; nothing comes before the beginning.
        ends = {"": 0}
        whole: list[StoredSegment] = []
        for piece in sorted(found.values(), key=lambda piece: piece.start):
            if ends.get(piece.after) == piece.start:
                whole.append(piece)
                ends[_digest(piece.name)] = piece.start + len(piece.tokens)
            else:
                self.remove([piece.name])
        return whole

    def read(self, name: str) -> Snapshot | None:
        """The bytes of a file; None where it is gone, damaged or another's."""
        path = self._path(name)
        try:
            with _opened(path) as file:
                header = self._header(file)
                text = file.read(4 * (header["end"] - header["start"]))
                data = file.read()
        except (OSError, ValueError, MemoryError):
            return None
        if crc32(text) != header["tokens_sum"] or sums_of(data) != header["sums"]:
            _delete(path)
            return None
        with suppress(OSError):
            os.utime(path)
        return Snapshot(header["end"], data, header["start"])

    def write(self, name: str, after: str, tokens: Tokens, snapshot: Snapshot, seconds: float) -> bool:
        """Put a piece on disk, making room for it; False where that cannot be.

        after: the digest of the text before it.
        """
        text = np.ascontiguousarray(tokens, "<i4").tobytes()
        header = {
            "identity": self._identity,
            "name": name,
            "after": after,
            "start": snapshot.start,
            "end": snapshot.length,
            "data_bytes": len(snapshot.data),
            "seconds": seconds,
            "tokens_sum": crc32(text),
            "sums": sums_of(snapshot.data),
        }
        parts = (packed(header), text, snapshot.data)
        size_bytes = sum(map(len, parts))
        if size_bytes > self.quota_bytes:
            return False
        try:
            make_private_folder(self._root)
            with self._lock():
                if self.forgotten:
                    return False
                self._clear_litter()
                if not self._make_room(size_bytes, self._chain(after)):
                    return False
                make_private_folder(self.folder)
                write_private_file(self._path(name), *parts)
        except (Timeout, NotImplementedError):  # the latter: a file system without locks
            return False
        except (OSError, MemoryError) as error:
            self.notice = f"what was read is not kept in {self._root}: {error_reason(error)}"
            return False
        self.notice = ""
        return True

    def has(self, name: str) -> bool:
        """Whether a file is there; what is in it is looked at when it is read."""
        return self._path(name).exists()

    def remove(self, names: Iterable[str]) -> None:
        """Delete these."""
        for name in names:
            _delete(self._path(name))

    def used_bytes(self) -> int:
        """What all files take, those of other models included."""
        return sum(map(_size, _files(self._root)))

    @property
    def forgotten(self) -> bool:
        """Whether somebody had all forgotten since `begin_again`, or since this was made."""
        return self._last_forgotten_ns() != self._forgotten_ns

    def begin_again(self) -> None:
        """What was to be forgotten is forgotten."""
        self._forgotten_ns = self._last_forgotten_ns()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _told(self, path: Path) -> StoredSegment | None:
        """What a file says of itself; None where it makes no sense here."""
        try:
            with _opened(path) as file:
                header = self._header(file)
                data = file.read(4 * (header["end"] - header["start"]))
                used = os.fstat(file.fileno()).st_mtime
            if crc32(data) != header["tokens_sum"] or path.name != f"{header['name']}{_SUFFIX}":
                return None
            tokens = np.frombuffer(data, "<i4").astype(np.int32)
            seconds = float(header["seconds"])
            return StoredSegment(
                header["name"], header["after"], header["start"], tokens, header["data_bytes"], seconds, used
            )
        except (OSError, ValueError, MemoryError):
            return None

    def _header(self, file: BinaryIO) -> dict[str, Any]:
        """The header of one of this model's files, which is read up to it. Raises OSError, ValueError."""
        header = read_header(file)
        if header["identity"] != self._identity:
            raise ValueError("it is another model's")
        whole = file.tell() + 4 * (header["end"] - header["start"]) + header["data_bytes"]
        if os.fstat(file.fileno()).st_size != whole:
            raise ValueError("it is cut short")
        return header

    def _chain(self, after: str) -> set[Path]:
        """The files of the text with that digest."""
        chain: set[Path] = set()
        wanted = [after]
        while digest := wanted.pop() if wanted else "":
            for path in set(self.folder.glob(f"{digest}-*{_SUFFIX}")) - chain:
                chain.add(path)
                with suppress(OSError, ValueError), _opened(path) as file:
                    wanted.append(str(read_header(file)["after"]))
        return chain

    def _make_room(self, wanted_bytes: int, sparing: set[Path]) -> bool:
        """Delete what is worth least until so much more fits; nothing before what goes on from it.

        False where it does not fit beside what is spared: then nothing is deleted.
        """
        if wanted_bytes + sum(map(_size, sparing)) > self.quota_bytes:
            return False
        over = self.used_bytes() + wanted_bytes - self.quota_bytes
        if over <= 0:
            return True
        for path in _by_value(self._root, time.time()):
            if over <= 0:
                break
            if path not in sparing:
                over -= _size(path)
                _delete(path)
        return True

    def _clear_litter(self) -> None:
        """Who holds the lock is the only writer: what is half written belongs to nobody."""
        for path in self._root.glob("*/.*.tmp"):
            _delete(path)

    def _last_forgotten_ns(self) -> int:
        try:
            return (self._root / _FORGOTTEN).stat().st_mtime_ns
        except OSError:
            return 0

    def _lock(self) -> FileLock:
        return _lock(self._root, _LOCK_SECONDS)


def delete_cached_prefixes(folder: Path | None = None) -> int:
    """Delete what is kept of every model, and make running programs drop what they would write.

    Gives the bytes that were freed. Raises OSError.
    """
    folder = folder or kept_folder()
    touch_private(folder / _FORGOTTEN)
    # Who writes just now may not have heard, and ends first.
    lock = _lock(folder, _PATIENCE_SECONDS)
    with suppress(Timeout, NotImplementedError):
        lock.acquire()
    try:
        return delete_files([*_files(folder), *folder.glob("*/.*.tmp")])
    finally:
        lock.release()


def _lock(folder: Path, seconds: float) -> FileLock:
    return FileLock(folder / "lock", timeout=seconds, mode=0o600)


def _opened(path: Path) -> BinaryIO:
    """A file to read once: another process may put another one in its place. Raises OSError."""
    regular_file_bytes(path)
    return path.open("rb")


def _by_value(root: Path, now: float) -> list[Path]:
    """All files, what is worth least first: seconds saved for each byte, less the longer it was not used."""
    value: dict[Path, float] = {}
    after: dict[Path, str] = {}
    named: dict[tuple[Path, str], list[Path]] = {}
    starts: dict[Path, int] = {}
    for path in _files(root):
        try:
            with _opened(path) as file:
                header = read_header(file)
            age = max(0.0, now - path.stat().st_mtime) + _FRESH_SECONDS
            value[path] = header["seconds"] / (header["data_bytes"] + 1) / age
            starts[path] = header["start"]
            after[path] = header["after"]
            named.setdefault((path.parent, _digest(path.name)), []).append(path)
        except (OSError, ValueError):
            value[path], starts[path] = 0.0, 0
    # What others go on from is worth as much as they are.
    for path in sorted(value, key=lambda path: -starts[path]):
        for before in named.get((path.parent, after.get(path, "")), ()):
            value[before] = max(value[before], value[path])
    return sorted(value, key=lambda path: (value[path], -starts[path]))


def _files(folder: Path) -> list[Path]:
    """The files of one model, or of all where it is the folder of all; none where it cannot be entered."""
    try:
        return [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*/*{_SUFFIX}")]
    except OSError:
        return []


def _digest(name: str) -> str:
    """What the name of a piece begins with: the digest of the text to its end."""
    return name.partition("-")[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
