"""Run llama.cpp's RPC server in a child process, so that an abort there does not take down the worker.

The worker queries the server for its version, devices and memory without loading llama.cpp. A request is a
command (1 byte), the size of its data (8 bytes, little-endian) and the data. A response is the size of its
data and the data.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import WorkerError
from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["HELLO", "LOOPBACK", "RpcChild", "probe_rpc_server"]

LOOPBACK = "127.0.0.1"
# Startup time limit in seconds. Importing llama.cpp takes seconds on a slow disk, and initialising a GPU can
# take longer.
_START_SECONDS = 60.0
_PROBE_SECONDS = 5.0
# Commands of the RPC protocol. A connection begins with HELLO.
HELLO, _DEVICE_MEMORY, _DEVICE_COUNT = 14, 11, 15
# HELLO exchanges the transports that each side supports. The request has 24 bytes, all 0 for TCP. The
# response has three version bytes, a padding byte and 24 bytes in the same format.
_TRANSPORTS = bytes(24)
_HELLO_RESPONSE_BYTES = 28
_MAX_DEVICES = 16


class RpcChild:
    """A running RPC server. It writes a byte to `beats` every second.

    Args:
        cache: Folder for received weights, or None to disable the cache.
        threads: Number of CPU threads, or None for the default.

    Attributes:
        port: The server's port on the loopback interface.
        llama_cpp: The version of llama-cpp-python.
        device_names: The names of the devices.
        on_cpu: Whether the only device is the CPU.
        server: The protocol version, and the memory of each device.
        beats: The stream of heartbeat bytes.

    Raises:
        WorkerError: The server cannot be started.
    """

    def __init__(self, cache: Path | None, threads: int | None) -> None:
        self._process = ChildProcess(module_arguments("edgespec.backends.llamacpp.rpc"))
        try:
            options = {"cache": None if cache is None else str(cache), "threads": threads}
            self._process.stdin.write(json.dumps(options).encode() + b"\n")
            self._process.stdin.flush()
            started = self._read_start()
            self.port, self.llama_cpp = int(started["port"]), str(started["llama_cpp"])
            self.device_names: tuple[str, ...] = tuple(started["devices"])
            self.on_cpu = bool(started["on_cpu"])
            self.server = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.beats = self._process.stdout

    def _read_start(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(
                "llama.cpp's RPC server exited during startup",
                "run `edgespec doctor` to check the installation",
                code="worker_not_started",
            )
        started: dict[str, Any] = json.loads(line)
        if "error" in started:
            raise WorkerError(started["error"], started["next_step"], code="worker_not_started")
        return started

    def _wait_until_ready(self) -> RpcServer:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                return probe_rpc_server(LOOPBACK, self.port, _PROBE_SECONDS)
            except (OSError, ValueError) as error:
                if time.monotonic() > end or not self._process.alive:
                    raise WorkerError(
                        f"llama.cpp's RPC server did not start: {error}",
                        "run `edgespec doctor` to check the installation",
                        code="worker_not_started",
                    ) from error
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop the server. Repeated calls have no effect."""
        self._process.close()


@dataclass(frozen=True, slots=True)
class RpcServer:
    """The protocol version of an RPC server, and the free and total memory of its devices in bytes."""

    version: tuple[int, int, int]
    devices: tuple[tuple[int, int], ...]


def probe_rpc_server(host: str, port: int, timeout_seconds: float) -> RpcServer:
    """Query an RPC server's version and devices.

    A server that is busy with another client accepts the connection but does not answer.

    Raises:
        OSError: The server cannot be reached or does not answer in time (`TimeoutError`).
        ValueError: The other side is not a llama.cpp RPC server.
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
            raise ValueError(f"the server reports an invalid number of devices ({count})")
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
