"""Store segments on disk in private files, one per segment, with a quota shared by all models.

Each file identifies the model, its settings, the tokens and the sequence before them, and contains checksums.
Files are validated when read. A file that does not match is ignored, and the model reprocesses the tokens.
Only one process writes at a time, and a file gets its final name only once it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from zlib import crc32

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from edgespec.memory.constants import DISK_CACHE_SHARE, FRESH_FILE_SECONDS, MAX_DISK_CACHE_BYTES
from edgespec.model.base import Snapshot
from edgespec.system.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    regular_file_bytes,
    touch_private,
    write_private_file,
)

__all__ = [
    "PrefixCacheDisk",
    "Tokens",
    "default_disk_bytes",
    "delete_cached_prefixes",
    "encode_header",
    "prefix_cache_folder",
    "read_header",
]

Tokens: TypeAlias = NDArray[np.int32]

# The folder, file and marker names contain "kept" and "forgotten", because other versions of edgespec use the
# same names and may be running.
_FOLDER, _SUFFIX = "kept", ".kept"
# Lock timeouts in seconds: for writing one cached prefix, and for deleting all cached prefixes.
_LOCK_SECONDS, _CLEAR_LOCK_SECONDS = 1.0, 10.0
# Name of a file whose modification time records when all cached prefixes were last deleted.
_CLEARED_MARK = "forgotten"
VERSION = 1
_MAGIC = b"edgespec kept %d\n" % VERSION
# Binary format of the header's size in bytes and CRC-32 checksum.
_SIZES = struct.Struct("<II")
_BLOCK_BYTES = 1 << 20
# Maximum size of a header in bytes. edgespec never writes larger headers.
_MAX_HEADER_BYTES = 1 << 24
_MAX_COUNT = 1 << 62
_TEXTS = ("identity", "name", "after")
_COUNTS = ("start", "end", "data_bytes", "tokens_sum")
_DIGEST = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment of a token sequence whose KV state is on disk, as described by its file header.

    `after` is the digest of the tokens before the segment, or empty at the start of a sequence.
    """

    name: str
    after: str
    start: int
    tokens: Tokens
    data_bytes: int
    last_used: float


def prefix_cache_folder() -> Path:
    """Return the folder for cached prefixes. It has one subfolder per combination of model and settings."""
    return data_folder() / _FOLDER


def default_disk_bytes(folder: Path | None = None) -> int:
    """Return the default disk quota for cached prefixes in bytes, or 0 if the free space is unknown."""
    folder = folder or prefix_cache_folder()
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free + sum(_size(path) for path in _files(folder))
    except OSError:
        return 0
    return min(MAX_DISK_CACHE_BYTES, int(free * DISK_CACHE_SHARE))


class PrefixCacheDisk:
    """Stores the prefix cache of one model on disk. Reports errors in `notice` instead of raising.

    Args:
        identity: Digest of everything other than the tokens that affects the KV state, such as the weights,
            the backend and its version, data types and kernels.
        quota_bytes: Size limit shared by all models. Defaults to `default_disk_bytes`.
        folder: Folder for all models' files. Defaults to `prefix_cache_folder`.
    """

    def __init__(self, identity: str, quota_bytes: int | None = None, folder: Path | None = None) -> None:
        self._root = folder or prefix_cache_folder()
        self.folder = self._root / identity[:32]
        self.quota_bytes = default_disk_bytes(self._root) if quota_bytes is None else quota_bytes
        self.notice = ""
        self._identity = identity
        self._cleared_ns = self._last_cleared_ns()

    def list_segments(self) -> list[StoredSegment]:
        """Return the model's cached segments on disk, ordered by start position.

        Unusable files are deleted along the way.
        """
        if self.used_bytes() > self.quota_bytes:
            with suppress(OSError, Timeout, NotImplementedError), _lock(self._root, _LOCK_SECONDS):
                self._make_room(0, set())
        found: dict[str, StoredSegment] = {}
        for path in _files(self.folder):
            segment = self._read_segment(path)
            if segment:
                found[segment.name] = segment
            else:
                _delete(path)
        lengths = {"": 0}
        complete: list[StoredSegment] = []
        for segment in sorted(found.values(), key=lambda segment: segment.start):
            if lengths.get(segment.after) == segment.start:
                complete.append(segment)
                lengths[_digest(segment.name)] = segment.start + len(segment.tokens)
            else:
                self.remove([segment.name])
        return complete

    def read(self, name: str) -> Snapshot | None:
        """Return the KV state of a cached segment, or None if its file is missing or unusable."""
        path = self._path(name)
        try:
            with _opened(path) as file:
                header = self._header(file)
                tokens = file.read(4 * (header["end"] - header["start"]))
                head_bytes: dict[str, int] = header.get("heads", {})
                data = file.read(header["data_bytes"] - sum(head_bytes.values()))
                heads = {name: file.read(size) for name, size in head_bytes.items()}
        except (OSError, ValueError, MemoryError):
            return None
        if crc32(tokens) != header["tokens_sum"] or _checksums(data, heads) != header["sums"]:
            _delete(path)
            return None
        with suppress(OSError):
            os.utime(path)
        return Snapshot(header["end"], data, header["start"], heads)

    def write(self, name: str, after: str, tokens: Tokens, snapshot: Snapshot, seconds: float) -> bool:
        """Write a segment, deleting less valuable segments to make room if necessary.

        Args:
            name: See `name_of`.
            after: Digest of the sequence before the segment.
            tokens: The segment's tokens.
            snapshot: The segment's KV state.
            seconds: Time the model took to prefill the tokens.

        Returns:
            Whether the segment is now on disk.
        """
        encoded = np.ascontiguousarray(tokens, "<i4").tobytes()
        header = {
            "identity": self._identity,
            "name": name,
            "after": after,
            "start": snapshot.start,
            "end": snapshot.length,
            "data_bytes": snapshot.size_bytes,
            "heads": {head: len(data) for head, data in snapshot.heads.items()},
            "seconds": seconds,
            "tokens_sum": crc32(encoded),
            "sums": _checksums(snapshot.data, snapshot.heads),
        }
        parts = (encode_header(header), encoded, snapshot.data, *snapshot.heads.values())
        size_bytes = sum(map(len, parts))
        if size_bytes > self.quota_bytes:
            return False
        try:
            make_private_folder(self._root)
            with _lock(self._root, _LOCK_SECONDS):
                if self.was_cleared:
                    return False
                for path in self._root.glob("*/.*.tmp"):
                    _delete(path)
                if not self._make_room(size_bytes, self._chain(after)):
                    return False
                make_private_folder(self.folder)
                write_private_file(self._path(name), *parts)
        except (Timeout, NotImplementedError):
            # Another process holds the lock, or the file system does not support locking.
            return False
        except (OSError, MemoryError) as error:
            self.notice = f"not caching earlier chats in {self._root}: {error_reason(error)}"
            return False
        self.notice = ""
        return True

    def has(self, name: str) -> bool:
        """Return whether the file of a cached segment exists, without validating it."""
        return self._path(name).exists()

    def remove(self, names: Iterable[str]) -> None:
        """Delete the files of the named segments."""
        for name in names:
            _delete(self._path(name))

    def used_bytes(self) -> int:
        """Return the disk space used by the cached prefixes of all models, in bytes."""
        return sum(map(_size, _files(self._root)))

    @property
    def was_cleared(self) -> bool:
        """Whether the user has deleted all cached prefixes since the last call to `acknowledge_clear`."""
        return self._last_cleared_ns() != self._cleared_ns

    def acknowledge_clear(self) -> None:
        """Reset `was_cleared`, so that prefixes are stored again."""
        self._cleared_ns = self._last_cleared_ns()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _read_segment(self, path: Path) -> StoredSegment | None:
        try:
            with _opened(path) as file:
                header = self._header(file)
                data = file.read(4 * (header["end"] - header["start"]))
                last_used = os.fstat(file.fileno()).st_mtime
            if crc32(data) != header["tokens_sum"] or path.name != f"{header['name']}{_SUFFIX}":
                return None
            tokens = np.frombuffer(data, "<i4").astype(np.int32)
            name, after, start, data_bytes = (header[key] for key in ("name", "after", "start", "data_bytes"))
            return StoredSegment(name, after, start, tokens, data_bytes, last_used)
        except (OSError, ValueError, MemoryError):
            return None

    def _header(self, file: BinaryIO) -> dict[str, Any]:
        header = read_header(file)
        if header["identity"] != self._identity:
            raise ValueError(f"the cache file {file.name} belongs to another model")
        whole = file.tell() + 4 * (header["end"] - header["start"]) + header["data_bytes"]
        if os.fstat(file.fileno()).st_size != whole:
            raise ValueError(f"the cache file {file.name} is incomplete")
        return header

    def _chain(self, after: str) -> set[Path]:
        chain: set[Path] = set()
        digests = [after]
        while digest := digests.pop() if digests else "":
            for path in set(self.folder.glob(f"{digest}-*{_SUFFIX}")) - chain:
                chain.add(path)
                with suppress(OSError, ValueError), _opened(path) as file:
                    digests.append(str(read_header(file)["after"]))
        return chain

    def _make_room(self, size_bytes: int, protected: set[Path]) -> bool:
        """Delete the least valuable files to make room for `size_bytes`.

        Return False if the segment cannot fit.
        """
        if size_bytes + sum(map(_size, protected)) > self.quota_bytes:
            return False
        over = self.used_bytes() + size_bytes - self.quota_bytes
        for path in _by_value(self._root, time.time()) if over > 0 else ():
            if over > 0 and path not in protected:
                over -= _size(path)
                _delete(path)
        return True

    def _last_cleared_ns(self) -> int:
        try:
            return (self._root / _CLEARED_MARK).stat().st_mtime_ns
        except OSError:
            return 0


def delete_cached_prefixes(folder: Path | None = None) -> int:
    """Delete the cached prefixes of all models. Running processes discard theirs without saving them.

    Returns:
        The number of bytes freed.

    Raises:
        OSError: A file cannot be deleted.
    """
    folder = folder or prefix_cache_folder()
    touch_private(folder / _CLEARED_MARK)
    lock = _lock(folder, _CLEAR_LOCK_SECONDS)
    with suppress(Timeout, NotImplementedError):
        lock.acquire()
    try:
        return delete_files([*_files(folder), *folder.glob("*/.*.tmp")])
    finally:
        lock.release()


def _checksums(data: bytes, heads: Mapping[str, bytes]) -> list[int]:
    names = (name.encode() for name in heads)
    return [checksum for part in (data, *heads.values(), *names) for checksum in _block_checksums(part)]


def _lock(folder: Path, seconds: float) -> FileLock:
    return FileLock(folder / "lock", timeout=seconds, mode=0o600)


def _opened(path: Path) -> BinaryIO:
    regular_file_bytes(path)
    return path.open("rb")


def _by_value(root: Path, now: float) -> list[Path]:
    """Return all files, least valuable first. Value is prefill time saved per byte, divided by age."""
    value: dict[Path, float] = {}
    after: dict[Path, str] = {}
    named: dict[tuple[Path, str], list[Path]] = {}
    starts: dict[Path, int] = {}
    for path in _files(root):
        try:
            with _opened(path) as file:
                header = read_header(file)
            age = max(0.0, now - path.stat().st_mtime) + FRESH_FILE_SECONDS
            value[path] = header["seconds"] / (header["data_bytes"] + 1) / age
            starts[path] = header["start"]
            after[path] = header["after"]
            named.setdefault((path.parent, _digest(path.name)), []).append(path)
        except (OSError, ValueError):
            value[path], starts[path] = 0.0, 0
    # A segment is worth at least as much as the segments after it, which are useless without it.
    for path in sorted(value, key=lambda path: -starts[path]):
        for before in named.get((path.parent, after.get(path, "")), ()):
            value[before] = max(value[before], value[path])
    return sorted(value, key=lambda path: (value[path], -starts[path]))


def _files(folder: Path) -> list[Path]:
    """Return the files in a model's folder, or all models' files if `folder` is their parent."""
    try:
        inner = (path for path in folder.glob(f"*/*{_SUFFIX}") if not path.parent.is_symlink())
        return [*folder.glob(f"*{_SUFFIX}"), *inner]
    except OSError:
        return []


def _digest(name: str) -> str:
    return name.partition("-")[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Encode the header of a file in the prefix cache as bytes."""
    encoded = json.dumps(header).encode()
    return b"".join((_MAGIC, _SIZES.pack(len(encoded), crc32(encoded)), encoded))


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read and validate a segment file's header, leaving the file positioned at the tokens.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is damaged, has an unsupported version or contains invalid values.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("the cache file has an unsupported version")
    sizes = file.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        raise ValueError("the cache file is incomplete")
    size, checksum = _SIZES.unpack(sizes)
    encoded = file.read(size) if size <= _MAX_HEADER_BYTES else b""
    if len(encoded) != size or crc32(encoded) != checksum:
        raise ValueError("the header of the cache file is damaged")
    try:
        header = json.loads(encoded)
    except RecursionError as error:
        raise ValueError("the header of the cache file is damaged: its JSON is nested too deeply") from error
    if not _is_valid_header(header):
        raise ValueError("the header of the cache file is damaged: it has missing or invalid values")
    return dict(header)


def _is_valid_header(header: Any) -> bool:
    if not isinstance(header, dict) or not all(isinstance(header.get(key), str) for key in _TEXTS):
        return False
    if not all(type(header.get(key)) is int and 0 <= header[key] < _MAX_COUNT for key in _COUNTS):
        return False
    seconds, heads = header.get("seconds"), header.get("heads", {})
    return (
        isinstance(heads, dict)
        and all(type(size) is int and size >= 0 for size in heads.values())
        and sum(heads.values()) <= header["data_bytes"]
        and header["start"] <= header["end"]
        and _DIGEST.fullmatch(header["after"]) is not None
        and isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 <= seconds < _MAX_COUNT
        and "sums" in header
    )


def _block_checksums(data: bytes) -> list[int]:
    """Return the CRC-32 checksum of each 1 MiB block of `data`."""
    view = memoryview(data)
    return [crc32(view[at : at + _BLOCK_BYTES]) for at in range(0, len(view), _BLOCK_BYTES)]
