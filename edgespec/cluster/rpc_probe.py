"""Query a llama.cpp RPC server for its version, devices and memory, without loading llama.cpp.

A request is a command (1 byte), the size of its data (8 bytes, little-endian) and the data. A response is the
size of its data and the data.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

__all__ = ["HELLO", "RpcServer", "probe_rpc_server"]

# Commands of the RPC protocol. A connection begins with HELLO.
HELLO, _DEVICE_MEMORY, _DEVICE_COUNT = 14, 11, 15
# HELLO carries the transports that each side supports: the request has 24 bytes, all 0 for TCP. The response
# has the version as three bytes, one byte of padding and the same 24 bytes.
_TRANSPORTS = bytes(24)
_HELLO_RESPONSE_BYTES = 28
_MAX_DEVICES = 16


@dataclass(frozen=True, slots=True)
class RpcServer:
    """The protocol version of an RPC server, and the free and total memory of its devices in bytes."""

    version: tuple[int, int, int]
    devices: tuple[tuple[int, int], ...]


def probe_rpc_server(host: str, port: int, timeout_seconds: float) -> RpcServer:
    """Return what an RPC server reports about itself.

    A server that is busy with another client accepts the connection but does not answer.

    Raises:
        OSError: The server cannot be reached or does not answer in time (`TimeoutError`).
        ValueError: The other side is not an RPC server of llama.cpp.
    """
    with socket.create_connection((host, port), timeout=timeout_seconds) as connection:

        def ask(command: int, data: bytes, response_bytes: int) -> bytes:
            connection.sendall(struct.pack("<BQ", command, len(data)) + data)
            (size,) = struct.unpack("<Q", _receive(connection, 8))
            if size != response_bytes:
                raise ValueError(f"the response has {size} bytes instead of {response_bytes}")
            return _receive(connection, response_bytes)

        major, minor, patch = ask(HELLO, _TRANSPORTS, _HELLO_RESPONSE_BYTES)[:3]
        (count,) = struct.unpack("<I", ask(_DEVICE_COUNT, b"", 4))
        if not 0 < count <= _MAX_DEVICES:
            raise ValueError(f"the server reports {count} devices")
        devices = [struct.unpack("<QQ", ask(_DEVICE_MEMORY, struct.pack("<I", i), 16)) for i in range(count)]
        return RpcServer((major, minor, patch), tuple((free, total) for free, total in devices))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ValueError("the server closed the connection")
        received += more
    return received
