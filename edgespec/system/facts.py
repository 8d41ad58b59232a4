"""Save small facts, such as measurements and test results, in an SQLite file for later runs."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from zlib import crc32

from edgespec.system.files import cache_folder, error_reason, regular_file_bytes

# Version of the file format. A file with another version is replaced.
_VERSION = 1
# Maximum number of facts of one kind, and maximum size of one value in bytes. The largest kind has an entry
# per pair of installed models, and the largest value takes about 10 KiB. Both limits were chosen to leave
# ample room.
_MAX_FACTS, _MAX_VALUE_BYTES = 5000, 2**18
# Lock timeout in seconds, and seconds after a timeout during which no call waits, so that a process that
# hangs while writing does not delay every call. Both values were chosen rather than measured.
_LOCK_SECONDS, _PAUSE_SECONDS = 1.0, 60.0
_CREATE_TABLE = "CREATE TABLE facts (kind TEXT, key TEXT, value BLOB, PRIMARY KEY (kind, key))"
_DELETE_OLDEST = (
    "DELETE FROM facts WHERE rowid IN"
    " (SELECT rowid FROM facts WHERE kind = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)"
)
# Low bytes of SQLite's error codes. `SQLITE_ERROR` means that the table is missing or has other columns.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Unsaved:
    """Data kept in memory for a file that this process could not write.

    Attributes:
        facts: The facts that could not be saved, by kind and key.
        why: Why the last save failed, or empty if it succeeded.
        no_wait_until: Time until which calls do not wait for the lock, because another process held it for
            too long.
    """

    facts: dict[tuple[str, str], bytes] = field(default_factory=dict)
    why: str = ""
    no_wait_until: float = 0.0


_unsaved: dict[Path, _Unsaved] = {}


class _DamagedError(Exception):
    """Raised when the file is not a database with the expected table."""


class Facts:
    """A persistent key-value store of JSON facts, grouped by kind.

    Problems with the file never make `get` or `put` raise an error or block for long. A damaged file is
    replaced.
    If the file cannot be written, new facts are kept in memory. Each fact has a checksum, so that damaged
    facts are not used.

    Thread-safe and fork-safe, because each call reopens the file. Several processes can use the file at once.

    Args:
        path: The file. Defaults to `facts.sqlite` in the cache folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "facts.sqlite"
        self._unsaved = _unsaved.setdefault(self.path, _Unsaved())

    @property
    def notice(self) -> str:
        """Why the last save failed, or empty if it succeeded."""
        why = self._unsaved.why
        return f"measurements cannot be saved in {self.path}: {why}" if why else ""

    def get(self, kind: str, key: str) -> Any:
        """Return a fact, or None if it is unknown. The caller validates the value."""
        row = kind, _digest(key)
        value = self._unsaved.facts.get(row)
        if value is None:
            with suppress(OSError):
                value = self._run(lambda database: _read(database, row))
        return None if value is None else json.loads(value)

    def put(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Save facts of one kind. If there are too many facts of that kind, delete the oldest."""
        unsaved, rows = self._unsaved, dict(self._unsaved.facts)
        for key, fact in facts.items():
            if len(value := json.dumps(fact).encode()) <= _MAX_VALUE_BYTES:
                rows[kind, _digest(key)] = value

        def write(database: sqlite3.Connection) -> None:
            values = [(*row, _checksum(row, value) + value) for row, value in rows.items()]
            database.executemany("REPLACE INTO facts VALUES (?, ?, ?)", values)
            if any(_read(database, row) != value for row, value in rows.items()):
                raise sqlite3.DatabaseError("the index is damaged")
            for each in {kind for kind, _ in rows}:
                database.execute(_DELETE_OLDEST, (each, _MAX_FACTS))

        try:
            self._run(write, writes=True)
        except OSError as error:
            unsaved.why = error_reason(error)
            unsaved.facts.update(rows)
            for row in list(unsaved.facts)[:-_MAX_FACTS]:
                unsaved.facts.pop(row, None)
        else:
            unsaved.why = ""
            for row in rows:
                unsaved.facts.pop(row, None)

    def delete(self, *kinds: str) -> int:
        """Delete all facts of the given kinds, and return the number of bytes freed.

        Raises:
            OSError: The file cannot be written.
        """
        for row in [row for row in self._unsaved.facts if row[0] in kinds]:
            self._unsaved.facts.pop(row, None)
        if not self.path.exists():
            return 0

        def delete(database: sqlite3.Connection) -> int:
            where = f"FROM facts WHERE kind IN ({', '.join('?' * len(kinds))})"
            (freed_bytes,) = database.execute(f"SELECT total(length(value)) {where}", kinds).fetchone()
            database.execute(f"DELETE {where}", kinds)
            return int(freed_bytes)

        return self._run(delete, writes=True) or 0

    def _run(self, operation: Callable[[sqlite3.Connection], _T], *, writes: bool = False) -> _T | None:
        """Run an operation, or return None if there is no file. Raises OSError if the file is unusable."""
        for _ in range(2):
            with suppress(_DamagedError):
                return self._run_once(operation, writes)
        raise OSError(EIO, "it is damaged", str(self.path))

    def _run_once(self, operation: Callable[[sqlite3.Connection], _T], writes: bool) -> _T | None:
        if writes:
            _create(self.path)
        try:
            regular_file_bytes(self.path)  # Opening a pipe could block.
            inode = self.path.stat().st_ino
        except FileNotFoundError:
            return None
        wait_seconds = 0.0 if monotonic() < self._unsaved.no_wait_until else _LOCK_SECONDS
        try:
            with _open(self.path, writes, wait_seconds) as database:
                return operation(database) if database else None
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes damaged names in its errors.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            # A damaged header may also claim that a newer SQLite version wrote the file, which makes it
            # read-only.
            is_too_new = code == sqlite3.SQLITE_READONLY and os.access(self.path, os.W_OK)
            if code in _DAMAGED or (is_too_new and os.access(self.path.parent, os.W_OK)):
                self._discard(inode)
                raise _DamagedError from error
            if code == sqlite3.SQLITE_BUSY and wait_seconds:
                self._unsaved.no_wait_until = monotonic() + _PAUSE_SECONDS
            raise OSError(EIO, str(error), str(self.path)) from error

    def _discard(self, inode: int) -> None:
        """Delete the damaged file, unless another process has replaced it."""
        with suppress(FileNotFoundError):
            if self.path.stat().st_ino == inode:
                for suffix in ("-journal", "-wal", "-shm", ""):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create a private file if it does not exist. SQLite's auxiliary files get the same permissions."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Do not open an existing file here, because closing it would release SQLite's locks in this process.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


@contextmanager
def _open(path: Path, writes: bool, wait_seconds: float) -> Iterator[sqlite3.Connection | None]:
    """Open the file for one transaction. Yield None if it is empty and nothing will be written."""
    database = sqlite3.connect(path, wait_seconds, isolation_level=None)
    try:
        if writes:
            database.execute("PRAGMA auto_vacuum = FULL")
            # Do not wait for the disk. If the power fails, the file may be damaged and will be replaced.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError("the file was written by a different version of edgespec")
        if version == 0 and writes:
            database.execute(_CREATE_TABLE)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        yield database if version or writes else None
        if writes:
            database.execute("COMMIT")
    finally:
        database.close()


def _read(database: sqlite3.Connection, row: tuple[str, str]) -> bytes | None:
    found = database.execute("SELECT value FROM facts WHERE kind = ? AND key = ?", row).fetchone()
    if found is None or not isinstance(found[0], bytes):
        return None
    checksum, value = found[0][:4], found[0][4:]
    return value if checksum == _checksum(row, value) else None


def _checksum(row: tuple[str, str], value: bytes) -> bytes:
    return crc32(value, crc32(" ".join(row).encode())).to_bytes(4, "big")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
