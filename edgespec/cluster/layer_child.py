"""Run layers of an MLX target in a child process of the worker, and exchange messages with it.

A message consists of the header size (4 bytes, little-endian), the data size (8 bytes), the header as a JSON
object, and the data. An empty message serves as a keepalive.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["Buffer", "LayerChild", "MessageConnection", "remove_folders", "temporary_folder"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_SIZES = struct.Struct("<IQ")
_MAX_HEADER_BYTES = 1 << 23
# Chunk size in bytes for sending and receiving data. The connection's timeout applies to each chunk rather
# than to the whole message.
_PART_BYTES = 1 << 20


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder that `remove_folders` can find if this process is killed."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders(pid: int) -> None:
    """Remove the temporary folders of a process that has exited or is about to."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(pid: int) -> str:
    return f"edgespec-layers-{pid}-"


class LayerChild:
    """A child process that runs layers until the target closes the connection.

    Args:
        connection: The connection to the target. The child process uses a duplicate of it.
        memory_bytes: The memory limit for weights.
        cache: Folder for received weights, or None to disable the cache.

    Raises:
        EdgespecError: The process cannot be started.
    """

    def __init__(self, connection: socket.socket, memory_bytes: int, cache: Path | None) -> None:
        number = connection.fileno()
        self._process = ChildProcess(
            module_arguments("edgespec.backends.mlx.layer_server"), open_files=(number,)
        )
        options = {
            "connection": number,
            "memory_bytes": memory_bytes,
            "cache": None if cache is None else str(cache),
        }
        self._process.stdin.write(json.dumps(options).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Stop the process, and remove its temporary folders. Repeated calls have no effect."""
        self._process.close()
        remove_folders(self._process.pid)


class MessageConnection:
    """Sends and receives messages. `send` and `beat` can be called from any thread.

    Args:
        connection: The connection. The caller closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], data: Buffer = b"") -> None:
        """Send a message. Raises OSError if the connection fails."""
        encoded = json.dumps(header).encode()
        start = _SIZES.pack(len(encoded), len(data)) + encoded
        with self._sending:
            # Send the header with the first chunk of data, so that a small message fits in a single packet.
            self._connection.sendall(start + bytes(data[:_PART_BYTES]))
            for first in range(_PART_BYTES, len(data), _PART_BYTES):
                self._connection.sendall(data[first : first + _PART_BYTES])

    def beat(self) -> None:
        """Send an empty message, unless a message is being sent. Raises OSError if the connection fails."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.sendall(bytes(_SIZES.size))
            finally:
                self._sending.release()

    def receive(self, max_data_bytes: int) -> tuple[dict[str, Any], bytearray]:
        """Return the header and data of the next non-empty message. See `receive_any`."""
        while (message := self.receive_any(max_data_bytes)) is None:
            pass
        return message

    def receive_any(self, max_data_bytes: int) -> tuple[dict[str, Any], bytearray] | None:
        """Return the header and data of the next message, or None if it is empty.

        Args:
            max_data_bytes: Maximum size of the data.

        Raises:
            OSError: The connection was lost or timed out.
            ValueError: The message is invalid, or its data exceeds `max_data_bytes`.
        """
        header_bytes, data_bytes = _SIZES.unpack(self._receive(_SIZES.size))
        if header_bytes > _MAX_HEADER_BYTES or data_bytes > max_data_bytes * bool(header_bytes):
            raise ValueError(
                f"a message has an invalid size: {header_bytes:,} bytes of header and {data_bytes:,} bytes of"
                " data"
            )
        if not header_bytes:
            return None
        try:
            header = json.loads(self._receive(header_bytes))
        except RecursionError as error:
            raise ValueError("the JSON header of a message is nested too deeply") from error
        if not isinstance(header, dict):
            raise ValueError("the header of a message is not a JSON object")
        return header, self._receive(data_bytes)

    def _receive(self, size: int) -> bytearray:
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            count = self._connection.recv_into(rest[:_PART_BYTES])
            if not count:
                raise ConnectionError("the other side closed the connection")
            rest = rest[count:]
        return received
