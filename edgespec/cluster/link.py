"""Reserve a worker for a target, detect when it is lost, and measure the speed of the connection.

The user can cancel the wait for a connection.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter as now
from typing import TypeAlias, TypeVar

from edgespec.cluster.machines import SshAddress, WorkerAddress
from edgespec.cluster.status import LAYERS, LEAD, MAX_STATUS_BYTES, MEASURE, MLX, PROBE, Library, WorkerStatus
from edgespec.errors import CancelledError, MemoryBudgetError, WorkerError
from edgespec.system import waiting
from edgespec.system.files import format_bytes

__all__ = [
    "ConnectProgress",
    "Link",
    "LinkSpeed",
    "answer_messages",
    "measure_link",
    "open_layers",
    "probe_worker",
    "set_timeouts",
    "usable_bytes",
    "wait_for",
]

_CONNECT_SECONDS = 5.0
# Time limit in seconds for a worker to report its status. If another target has just used the worker, its RPC
# server needs a few seconds to become ready. Until then, the worker sends a space every second.
_STATUS_SECONDS = 20.0
# Retry a busy worker for this many seconds, because a worker takes a moment to notice that the last model was
# closed.
_BUSY_SECONDS = 5.0
_ASK_AGAIN_SECONDS = 0.25
# Seconds of silence after which a worker counts as lost. A worker sends a heartbeat byte every second.
SILENCE_SECONDS = 8.0
_SIZE = struct.Struct("<Q")
_ROUND_TRIPS = 9
# The speed test sends increasingly large messages until one takes this many seconds. Starting small keeps the
# test short on slow networks.
_ENOUGH_SECONDS = 0.1
_FIRST_BYTES, _MAX_BYTES, _GROWTH = 1 << 16, 1 << 26, 4
_CHUNK = bytes(1 << 20)
_Result = TypeVar("_Result")
# Called with a description and a fraction. Returning False cancels the connection.
ConnectProgress: TypeAlias = Callable[[str, float], bool]


def set_timeouts(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and enable TCP keepalive to detect unreachable machines."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def probe_worker(address: WorkerAddress) -> WorkerStatus:
    """Return a worker's status without reserving it. Raises WorkerError."""
    with worker_connection(address, PROBE) as (_, status):
        return status


@contextmanager
def worker_connection(
    address: WorkerAddress, greeting: bytes
) -> Iterator[tuple[socket.socket, WorkerStatus]]:
    """Connect to a worker, and yield the connection and the worker's status. Raises WorkerError.

    Args:
        address: The worker.
        greeting: The first line of the connection. See `status.py`.
    """
    with _connect(address) as connection:
        yield connection, _status(connection, address, greeting)


def open_layers(address: WorkerAddress) -> socket.socket:
    """Connect to the process that runs an MLX target's layers on a reserved worker. Raises WorkerError.

    Receiving from the connection raises TimeoutError if the worker hangs.
    """
    connection = _connect(address)
    with suppress(OSError):
        # Ignore a lost connection here, because the next call reports it.
        connection.sendall(LAYERS)
    return connection


def usable_bytes(address: WorkerAddress | SshAddress, status: WorkerStatus, library: Library) -> int:
    """Return the memory that a target may use on a worker.

    Args:
        address: The worker, with the memory that the user requested.
        status: The worker's status.
        library: The library that runs the target, with its version on this machine.

    Raises:
        WorkerError: The worker is busy, lacks the library or has a different version of it.
        MemoryBudgetError: The worker offers less memory than requested.
    """
    if status.busy:
        raise WorkerError(
            f"the worker {address} is busy with another model",
            "wait until that model is closed, or use another worker",
            code="worker_busy",
        )
    if (version := status.version_of(library.name)) != library.version:
        theirs = f"{library.name} {version}" if version else f"no {library.name}"
        setup = "scripts/setup mlx" if library.name == MLX else "scripts/setup workers"
        raise WorkerError(
            f"the worker {address} has {theirs}, but this machine has {library.version or 'none'}",
            f"install the same version of edgespec on both machines with `{setup}`",
            code="worker_version_mismatch",
        )
    wanted = address.memory_bytes
    if wanted is not None and wanted > status.memory_bytes:
        raise MemoryBudgetError(
            f"the worker {address} offers only {format_bytes(status.memory_bytes)} of memory, but --workers"
            f" requests {format_bytes(wanted)}",
            "close programs there, request less memory, or, if the worker was started with --memory, restart"
            " it with a higher limit",
        )
    return status.memory_bytes if wanted is None else wanted


class Link:
    """Reserves a worker until `close`, and notices when the worker exits or hangs.

    Args:
        address: The worker.
        library: The library that runs the target, with its version on this machine. The worker must have the
            same version.

    Attributes:
        address: The worker.
        status: The worker's status.
        memory_bytes: The memory that the target may use on the worker.

    Raises:
        WorkerError: The worker is unreachable, is busy or has a different version, or the address is not a
            worker's.
        MemoryBudgetError: The worker offers less memory than requested.
    """

    def __init__(self, address: WorkerAddress, library: Library) -> None:
        self.address = address
        self._is_closed = False
        self._connection, self.status = _reserve(address)
        try:
            self.memory_bytes = usable_bytes(address, self.status, library)
        except BaseException:
            self._connection.close()
            raise

    def watch(self, on_lost: Callable[[str, str], None]) -> None:
        """Call `on_lost` from another thread when the worker exits or hangs.

        `on_lost` receives two strings: which worker was lost and why, and what the user can do about it.
        """
        threading.Thread(target=self._watch, args=(on_lost,), name="edgespec-link", daemon=True).start()

    def _watch(self, on_lost: Callable[[str, str], None]) -> None:
        why = "exited, or the connection to it was lost"
        self._connection.settimeout(SILENCE_SECONDS)
        try:
            while self._connection.recv(4096):
                pass
        except TimeoutError:
            why = f"has not responded for {SILENCE_SECONDS:g} seconds"
        except OSError as error:
            why = f"can no longer be reached ({error.strerror})"
        if not self._is_closed:
            on_lost(f"the worker {self.address} {why}", self.address.restart_advice)

    def close(self) -> None:
        """Release the worker. Repeated calls have no effect."""
        self._is_closed = True
        with suppress(OSError):
            # Wake the thread that is blocked on receiving data.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _reserve(address: WorkerAddress) -> tuple[socket.socket, WorkerStatus]:
    """Connect to a worker and reserve it, unless the returned status says that it is busy."""
    end = time.monotonic() + _BUSY_SECONDS
    connection, status = _ask_to_lead(address)
    while status.busy and time.monotonic() < end:
        connection.close()
        time.sleep(_ASK_AGAIN_SECONDS)
        try:
            connection, status = _ask_to_lead(address)
        except WorkerError:
            # Report that the worker is busy, which is more helpful than the error from this attempt.
            break
    return connection, status


def _ask_to_lead(address: WorkerAddress) -> tuple[socket.socket, WorkerStatus]:
    connection = _connect(address)
    try:
        return connection, _status(connection, address, LEAD)
    except BaseException:
        connection.close()
        raise


def _connect(address: WorkerAddress) -> socket.socket:
    try:
        connection = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        reason = "it did not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise WorkerError(
            f"the worker {address} is unreachable: {reason}",
            "check the address and the firewall, and make sure that `edgespec worker` is running there",
        ) from error
    set_timeouts(connection)
    connection.settimeout(SILENCE_SECONDS)
    return connection


def _status(connection: socket.socket, address: WorkerAddress, greeting: bytes) -> WorkerStatus:
    try:
        connection.sendall(greeting)
        return WorkerStatus.from_json(_line(connection))
    except TimeoutError as error:
        raise WorkerError(
            f"the worker {address} accepted the connection, but did not report its status in time",
            "check the port, and restart `edgespec worker` there",
        ) from error
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"{address} does not seem to be an edgespec worker",
            "check the port, and make sure that `edgespec worker` is running there",
        ) from error


def _line(connection: socket.socket) -> bytes:
    """Receive a line. Reads byte by byte, because the data after the line belongs to `Link.watch`."""
    line, end = b"", time.monotonic() + _STATUS_SECONDS
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if time.monotonic() > end:
            raise TimeoutError
        if not more or len(line) > MAX_STATUS_BYTES:
            raise ValueError("the connection closed before the worker reported its status")
        line += more
    return line


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured speed of the connection to a worker.

    Attributes:
        round_trip_seconds: Time for a small message and its answer.
        bytes_per_second: Bandwidth towards the worker.
    """

    round_trip_seconds: float
    bytes_per_second: float


def measure_link(address: WorkerAddress) -> LinkSpeed:
    """Measure the latency and bandwidth of the connection to a worker, which may be in use.

    Takes less than a second on most networks.

    Raises:
        WorkerError: The worker is unreachable, or the connection was lost.
    """
    with worker_connection(address, MEASURE) as (connection, _):
        try:
            round_trip = median(_seconds(connection, 0) for _ in range(_ROUND_TRIPS))
            size = _FIRST_BYTES
            while (seconds := _seconds(connection, size)) < _ENOUGH_SECONDS and size < _MAX_BYTES:
                size *= _GROWTH
        except OSError as error:
            raise WorkerError(
                f"the connection to the worker {address} was lost while its speed was being measured",
                "check the network, and make sure that the worker runs the same version of edgespec",
            ) from error
    # The data transfer and the round trip partly overlap, so subtract at most half of the measured time.
    return LinkSpeed(round_trip, size / max(seconds - round_trip, seconds / 2))


def _seconds(connection: socket.socket, size: int) -> float:
    """Send a message with `size` bytes of data, and return the seconds until the answer arrives."""
    began = now()
    connection.sendall(_SIZE.pack(size))
    for start in range(0, size, len(_CHUNK)):
        connection.sendall(_CHUNK[: size - start])
    if not connection.recv(1):
        raise ConnectionError("the worker closed the connection")
    return now() - began


def answer_messages(connection: socket.socket) -> None:
    """Answer messages from `measure_link` until the other side closes the connection.

    Raises:
        OSError: The connection was lost.
    """
    buffer = memoryview(bytearray(len(_CHUNK)))
    while header := connection.recv(_SIZE.size, socket.MSG_WAITALL):
        if len(header) < _SIZE.size:
            return
        (left,) = _SIZE.unpack(header)
        while left:
            received = connection.recv_into(buffer[: min(left, len(buffer))])
            if not received:
                return
            left -= received
        connection.sendall(b".")


def wait_for(
    work: Callable[[], _Result],
    description: str,
    progress: ConnectProgress | None,
    discard: Callable[[_Result], None] = lambda _: None,
) -> _Result:
    """Run `work` in a thread and return its result, or re-raise its exception.

    Args:
        work: The call. It keeps running if the wait is cancelled.
        description: What the call does, such as `connecting to host:port`.
        progress: Called repeatedly during the wait.
        discard: Called with the result if the wait was cancelled.

    Raises:
        CancelledError: `progress` returned False.
    """

    def check() -> None:
        if progress is not None and not progress(description, 0.0):
            raise CancelledError(f"{description} was cancelled")

    check()
    return waiting.wait_for(work, check, discard)
