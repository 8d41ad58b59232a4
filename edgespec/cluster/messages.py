"""Messages between an MLX target and the process on a worker that runs some of its layers.

A message consists of the header size (4 bytes, little-endian), the data size (8 bytes), the header as a JSON
object, and the data. An empty message serves as a keepalive.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Buffer", "MessageConnection"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_SIZES = struct.Struct("<IQ")
_MAX_HEADER_BYTES = 1 << 23
# Data is sent and received in chunks of this size, because the connection's timeout applies to each chunk.
_PART_BYTES = 1 << 20


class MessageConnection:
    """Sends and receives messages. `send` and `beat` can be called from any thread.

    Args:
        connection: The connection. The caller closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], data: Buffer = b"") -> None:
        """Send a message. Raises OSError."""
        encoded = json.dumps(header).encode()
        start = _SIZES.pack(len(encoded), len(data)) + encoded
        with self._sending:
            # Send a small message in a single packet.
            self._connection.sendall(start + bytes(data[:_PART_BYTES]))
            for first in range(_PART_BYTES, len(data), _PART_BYTES):
                self._connection.sendall(data[first : first + _PART_BYTES])

    def beat(self) -> None:
        """Send an empty message, unless a message is being sent. Raises OSError."""
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
            OSError: The connection broke or timed out.
            ValueError: The message is invalid, or its data exceeds `max_data_bytes`.
        """
        header_bytes, data_bytes = _SIZES.unpack(self._receive(_SIZES.size))
        if header_bytes > _MAX_HEADER_BYTES or data_bytes > max_data_bytes * bool(header_bytes):
            raise ValueError(f"a message has {header_bytes:,} and {data_bytes:,} bytes")
        if not header_bytes:
            return None
        try:
            header = json.loads(self._receive(header_bytes))
        except RecursionError as error:
            raise ValueError("the header of a message is nested too deeply") from error
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
