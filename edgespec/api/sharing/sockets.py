"""Sockets through which a user's programs find each other's models."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import psutil
from filelock import FileLock

from edgespec.system.files import data_folder

__all__ = ["connect", "limit_sends", "listen", "loading_lock", "sockets", "stop_receiving"]

# Maximum number of connections waiting to be accepted.
_BACKLOG = 64
# Timeouts in seconds for connecting to another program and for sending to it, in case it is suspended.
_CONNECT_SECONDS, _SEND_SECONDS = 1.0, 5


def listen() -> Listener | None:
    """Return a listener on a new socket for this process, or None if this machine does not support it."""
    if (folder := _folder(create=True)) is None:
        return None
    for number in range(100):
        path = folder / f"{_prefix()}-{os.getpid()}-{number}.sock"
        with suppress(OSError):
            return Listener(str(path), "AF_UNIX", backlog=_BACKLOG)
    return None


def sockets() -> Iterator[Path]:
    """Yield the sockets of the user's other programs, oldest program first."""
    if (folder := _folder(create=False)) is None:
        return
    found = []
    for path in folder.glob(f"{_prefix()}-*.sock"):
        with suppress(OSError):  # Its program may have ended just now.
            found.append((path.lstat().st_mtime, path))
    yield from (path for _, path in sorted(found))


def loading_lock(identity: object) -> FileLock | None:
    """Return the lock that programs hold while they load a model, or None if the lock cannot be created."""
    if (folder := _folder(create=True)) is None:
        return None
    name = hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return FileLock(folder / f"{_prefix()}-{name}.lock")


def limit_sends(connection: Connection) -> None:
    """Make sending fail with OSError if the other program reads nothing for `_SEND_SECONDS`."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))


def stop_receiving(connection: Connection) -> None:
    """Make all receives on a connection raise EOFError, in every thread. Sending still works."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as other:
        other.shutdown(socket.SHUT_RD)


def connect(path: Path) -> Connection:
    """Connect to a socket, deleting it if its program was killed. Raises OSError if it cannot be used."""
    # Do not use `multiprocessing.connection.Client`, which would wait forever for a suspended program.
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            # Check the process first, because programs that are starting or exiting also refuse connections.
            if not psutil.pid_exists(int(path.stem.split("-")[1])):
                path.unlink(missing_ok=True)
            raise
        client.setblocking(True)
        connection = Connection(client.detach())
    limit_sends(connection)
    return connection


def _folder(*, create: bool) -> Path | None:
    """Return the folder for the sockets, which only this user can access, or None.

    Objects received through the sockets are unpickled, so other users must not be able to connect.
    """
    if sys.platform == "win32":
        return None
    try:
        # The socket cannot be in the data folder, because the path of a socket is limited to about 100 bytes.
        folder = Path(tempfile.gettempdir()) / f"edgespec-{os.getuid()}"
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_private = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    return folder if stat.S_ISDIR(status.st_mode) and is_private else None


def _prefix() -> str:
    """Return the prefix of socket names.

    Each data folder has its own prefix, so that only programs with the same data folder share models.
    """
    return hashlib.sha256(os.fsencode(data_folder())).hexdigest()[:8]
