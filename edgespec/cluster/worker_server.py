"""The server behind `edgespec worker`, which lets models on other machines use this machine's memory.

llama.cpp's RPC server runs in a child process, so that an abort there does not take down the worker. The
worker queries it for its version, devices and memory without loading llama.cpp. A request is a command (1
byte), the size of its data (8 bytes, little-endian) and the data. A response is the size of its data and the
data.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from edgespec.cluster.connected import answer_messages, set_timeouts
from edgespec.cluster.layer_child import LayerChild
from edgespec.cluster.machines import (
    LAYERS,
    LEAD,
    LOOPBACK,
    MEASURE,
    PROBE,
    Device,
    WorkerStatus,
    installed_mlx,
)
from edgespec.cluster.weight_cache import WeightCache
from edgespec.errors import EdgespecError, WorkerError
from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["HELLO", "RpcChild", "WorkerServer", "probe_rpc_server"]

# Commands of the RPC protocol. A connection begins with HELLO.
HELLO, _DEVICE_MEMORY, _DEVICE_COUNT = 14, 11, 15
# HELLO exchanges the transports that each side supports. The request has 24 bytes, all 0 for TCP. The
# response has three version bytes, a padding byte and 24 bytes in the same format.
_TRANSPORTS = bytes(24)
_HELLO_RESPONSE_BYTES = 28
_MAX_DEVICES = 16
# Time limit in seconds for the RPC server to start. Importing llama.cpp takes seconds on a slow disk, and
# initialising a GPU can take longer.
_START_SECONDS = 60.0
_PROBE_SECONDS = 5.0

# Time limit in seconds for a client to send its greeting.
_GREETING_SECONDS = 5.0
# Maximum number of simultaneous connections whose clients have sent a greeting. A target needs two.
_MAX_CONNECTIONS = 16
# Maximum number of connections whose clients have sent nothing yet, such as those of a port scanner.
_MAX_SILENT = 16
_RPC = bytes([HELLO])
_RELAYED_BYTES = 1 << 20
# Seconds that a new target waits for the worker to notice that the previous one closed its connection.
_RELEASE_SECONDS = 5.0
# Number of attempts to start the RPC server, which a system short of memory may kill while it starts.
_START_ATTEMPTS = 3
# Seconds without TCP acknowledgements after which a target's machine counts as lost, for example after a
# power failure.
_UNREACHABLE_SECONDS = 60
# A socket option from macOS's <netinet/tcp.h>, in seconds.
_TCP_RXT_CONNDROPTIME = 0x80
# Seconds between the heartbeats (spaces) that a waiting client receives.
_BEAT_SECONDS = 1.0
# Seconds between checks whether the server has been closed.
_POLL_SECONDS = 0.2
# Main memory in bytes that a worker without a GPU leaves to other programs.
_RESERVE_BYTES = 512 * 2**20


class _SilentConnections:
    """Connections whose clients have not sent a greeting yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    def add(self, connection: socket.socket) -> None:
        """Add a connection. If there are too many, close the oldest one.

        A target sends its greeting immediately, so the oldest silent connection is unlikely to be a target's.
        """
        with self._lock:
            self._connections.append(connection)
            if len(self._connections) > _MAX_SILENT:
                with suppress(OSError):
                    # Only shut the connection down here, because the thread that waits for the greeting
                    # closes it.
                    self._connections.pop(0).shutdown(socket.SHUT_RDWR)

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection if it is still listed. Call this before closing the connection."""
        with self._lock, suppress(ValueError):
            self._connections.remove(connection)


class WorkerServer:
    """Listens on one port for a target on another machine. `close` can be called from any thread.

    A target's first connection reserves the worker until the target closes it, and carries a heartbeat byte
    from the RPC server every second. Further connections are accepted only while the worker is reserved. A
    GGUF target's connections are relayed to the RPC server. An MLX target's connection is handed to a child
    process, of which there is at most one.

    The RPC server is a child process too. After each target, it is replaced to free its memory, and the child
    process for MLX layers is stopped.

    Args:
        version: The version of edgespec.
        host: The address to listen on.
        port: The port, or 0 for a free one.
        memory_bytes: The memory to offer, or None for the free memory.
        cache: Cache for received weights, or None to disable it.
        threads: Number of CPU threads, or None for the default.
        speed: The measured speed of this machine. See `WorkerStatus`.
        note: Called with a line of text for the log, for example when a target connects.

    Raises:
        WorkerError: The port is in use, the RPC server cannot be started, or the cache cannot be used.
    """

    def __init__(
        self,
        version: str,
        host: str,
        port: int,
        *,
        memory_bytes: int | None = None,
        cache: WeightCache | None = None,
        threads: int | None = None,
        speed: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._version, self._memory_bytes, self._threads = version, memory_bytes, threads
        self._cache, self._speed, self._note = cache, speed, note
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._leader: socket.socket | None = None
        self._layers: LayerChild | None = None
        self._is_closed = False
        self._failure: WorkerError | None = None
        self._silent = _SilentConnections()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        if cache is not None:
            cache.prepare()
        self._listener = _listen(host, port)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        try:
            self._child = self._start_child()
        except BaseException:
            self._listener.close()
            raise

    def _start_child(self) -> RpcChild:
        child = RpcChild(self._prepared_cache(), self._threads)
        threading.Thread(target=self._forward_beats, args=(child,), daemon=True).start()
        if self._cache is not None:
            if warning := self._cache.disk_warning():
                self._note(warning)
            # Hashing takes a while, and must neither delay the next target nor compete with it for the CPU.
            threading.Thread(target=self._cache.verify, args=(self._is_idle,), daemon=True).start()
        return child

    def _prepared_cache(self) -> Path | None:
        """Return the folder of the weight cache, or None if there is no usable cache."""
        try:
            return None if self._cache is None else self._cache.prepare()
        except WorkerError as error:
            self._note(str(error))
            return None

    def _is_idle(self) -> bool:
        return self._leader is None and not self._is_closed

    def status(self) -> WorkerStatus:
        """Return the worker's status, including its free memory."""
        child = self._child
        free = list(child.server.free_bytes)
        if child.on_cpu:
            # Use the available memory, because llama.cpp reports all memory as free.
            free = [max(0, psutil.virtual_memory().available - _RESERVE_BYTES)]
        offered = sum(free) if self._memory_bytes is None else min(self._memory_bytes, sum(free))
        return WorkerStatus(
            edgespec=self._version,
            llama_cpp=child.llama_cpp,
            protocol=".".join(map(str, child.server.version)),
            devices=tuple(map(Device, child.device_names, free)),
            memory_bytes=offered,
            busy=self._leader is not None,
            speed=self._speed,
            mlx_lm=installed_mlx(),
        )

    def serve(self) -> None:
        """Serve targets until `close`. Raises WorkerError if the RPC server cannot be restarted."""
        self._listener.settimeout(_POLL_SECONDS)
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # Too many files are open, or the client has disconnected.
                time.sleep(_POLL_SECONDS)
                continue
            self._silent.add(connection)
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()
        self._listener.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop `serve` and the RPC server. This closes the current target's connections."""
        self._is_closed = True
        with self._lock:
            self._child.close()
            self._end_layers()

    def _handle(self, connection: socket.socket) -> None:
        # Ignore clients that disconnect or send nothing. If the RPC server is lost, `_forward_beats`
        # disconnects the target.
        with suppress(OSError), connection:
            try:
                set_timeouts(connection)
                connection.settimeout(_GREETING_SECONDS)
                greeting = _greeting(connection)
            finally:
                self._silent.remove(connection)
            if self._slots.acquire(blocking=False):
                try:
                    self._answer(connection, greeting)
                finally:
                    self._slots.release()

    def _answer(self, connection: socket.socket, greeting: bytes) -> None:
        """Handle a client according to its greeting. Raises OSError if the client disconnects."""
        if greeting == _RPC:
            # `_lead` sends the status before it sets `_leader`, and the client can connect in between. The
            # lock makes this thread wait until `_leader` is set.
            with self._lock:
                is_reserved = self._leader is not None
            if is_reserved:
                self._relay(connection)
        elif greeting == PROBE:
            connection.sendall(self._status_line())
        elif greeting == LEAD:
            self._lead(connection)
        elif greeting == MEASURE:
            connection.sendall(self._status_line())
            answer_messages(connection)
        elif greeting == LAYERS:
            self._lend_layers(connection)

    def _status_line(self, *, busy: bool | None = None) -> bytes:
        status = self.status()
        return (replace(status, busy=status.busy if busy is None else busy)).to_line()

    def _lead(self, connection: socket.socket) -> None:
        """Reserve the worker for the client until the client closes the connection."""
        # Send heartbeats while another thread holds the lock to replace the previous target's RPC server.
        while not self._lock.acquire(timeout=_BEAT_SECONDS):
            connection.sendall(b" ")
        try:
            if self._leader is not None and _has_ended(self._leader):
                self._released.wait(_RELEASE_SECONDS)
            is_busy = self._leader is not None
            if not is_busy:
                # Hide cache files that have changed since the RPC server started.
                self._prepared_cache()
            connection.sendall(self._status_line(busy=is_busy))
            if is_busy:
                return
            self._leader = connection
        finally:
            self._lock.release()
        self._note("a model is using this worker")
        try:
            connection.settimeout(None)
            _end_if_unreachable(connection)
            while connection.recv(4096):
                pass
        finally:
            with self._lock:
                self._leader = None
                self._replace_child()
                self._released.notify_all()
            self._note("the model was closed")

    def _lend_layers(self, connection: socket.socket) -> None:
        """Hand the connection to a process that runs layers, or close it if the worker is not reserved."""
        memory_bytes = self.status().memory_bytes
        with self._lock:
            if self._leader is not None and self._layers is None and not self._is_closed:
                connection.settimeout(None)
                folder = None if self._cache is None else self._cache.folder
                try:
                    self._layers = LayerChild(connection, memory_bytes, folder)
                except EdgespecError as error:
                    self._note(str(error))

    def _end_layers(self) -> None:
        if self._layers is not None:
            self._layers.close()
            self._layers = None

    def _replace_child(self) -> None:
        self._child.close()
        self._end_layers()
        if self._is_closed:
            return
        for _ in range(_START_ATTEMPTS):
            try:
                self._child = self._start_child()
            except WorkerError as error:
                self._failure = error
            else:
                self._failure = None
                return
        self._is_closed = True

    def _forward_beats(self, child: RpcChild) -> None:
        """Forward the RPC server's heartbeat to the target. Disconnect the target if the server exits."""
        while beat := _read_beat(child):
            if (leader := self._leader) is not None:
                with suppress(OSError):
                    leader.send(beat, socket.MSG_DONTWAIT)
        with self._lock:
            if child is not self._child or self._is_closed:
                return
            if (leader := self._leader) is not None:
                self._note("llama.cpp's RPC server exited and is being restarted")
                with suppress(OSError):
                    # This makes `_lead` replace the RPC server.
                    leader.shutdown(socket.SHUT_RDWR)
            else:
                self._replace_child()

    def _relay(self, client: socket.socket) -> None:
        with socket.create_connection((LOOPBACK, self._child.port), timeout=_GREETING_SECONDS) as server:
            set_timeouts(server)
            for connection in (client, server):
                connection.settimeout(None)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


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
        server: The protocol version, and the free memory of each device.
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
                return probe_rpc_server(self.port)
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
    """The protocol version of an RPC server, and the free memory of its devices in bytes."""

    version: tuple[int, int, int]
    free_bytes: tuple[int, ...]


def probe_rpc_server(port: int) -> RpcServer:
    """Query the version and devices of an RPC server on this machine.

    A server that is busy with another client accepts the connection but does not answer.

    Raises:
        OSError: The server cannot be reached or does not answer in time (`TimeoutError`).
        ValueError: The other side is not a llama.cpp RPC server.
    """
    with socket.create_connection((LOOPBACK, port), timeout=_PROBE_SECONDS) as connection:

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
        # The server returns the free and the total memory of each device.
        memory = [struct.unpack("<QQ", ask(_DEVICE_MEMORY, struct.pack("<I", i), 16)) for i in range(count)]
        return RpcServer((major, minor, patch), tuple(free for free, _ in memory))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ValueError("the server closed the connection")
        received += more
    return received


def _read_beat(child: RpcChild) -> bytes:
    try:
        return child.beats.read(1)
    except (OSError, ValueError):  # The stream was closed together with the child process.
        return b""


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the client closed the connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _end_if_unreachable(connection: socket.socket) -> None:
    """Make the system drop the connection soon if the peer vanishes. Linux waits 15 minutes by default."""
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, _UNREACHABLE_SECONDS)
    elif sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREACHABLE_SECONDS)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copy bytes until one side closes its connection, then close both."""
    buffer = memoryview(bytearray(_RELAYED_BYTES))
    with suppress(OSError):
        while size := source.recv_into(buffer):
            sink.sendall(buffer[:size])
    for connection in (source, sink):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _greeting(connection: socket.socket) -> bytes:
    """Return a client's first line, or `_RPC` without consuming it for RPC clients. Raises OSError."""
    if connection.recv(1, socket.MSG_PEEK) == _RPC:
        return _RPC
    line = b""
    while len(line) < max(map(len, (PROBE, LEAD, MEASURE, LAYERS))) and not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more:
            break
        line += more
    return line


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        # Remove the address that Python adds to the reason.
        reason = str(error.strerror or error).partition(" (while ")[0]
        raise WorkerError(
            f"the worker cannot listen on {host}:{port}: {reason}",
            "stop the worker or other program that uses this port, or choose another address with --listen",
            code="address_unavailable",
        ) from error
