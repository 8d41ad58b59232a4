"""Reserve a target's workers, detect when one is lost, and run the calls that depend on them.

Calls that may hang run in a separate thread, so that the caller can continue if a worker is lost. The user
can cancel the wait for a connection.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median
from time import perf_counter as now
from typing import Any, TypeVar

from edgespec.cluster.machines import (
    LAYERS,
    LEAD,
    MAX_STATUS_BYTES,
    MEASURE,
    MLX,
    PROBE,
    Library,
    Machines,
    SshAddress,
    WorkerAddress,
    WorkerStatus,
)
from edgespec.cluster.ssh import ConnectProgress, reach_workers
from edgespec.errors import CancelledError, MemoryBudgetError, WorkerError, WorkerLostError
from edgespec.system import waiting
from edgespec.system.files import format_bytes

__all__ = [
    "ConnectedWorkers",
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
# When llama.cpp loses a connection, the worker's link usually breaks too. Wait this many seconds for the
# link's error, which says which worker was lost.
_REASON_SECONDS = 2.0
# Seconds to wait for the current pass to finish after an interrupt before abandoning it. The next reply has
# to wait until an abandoned pass ends.
_INTERRUPT_SECONDS = 0.2
# Seconds that `close` waits for an abandoned pass to finish, so that the final call can still run.
_CLOSE_SECONDS = 2.0


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
        greeting: The first line of the connection. See `PROBE`.
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


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.is_done = self.is_abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None


class ConnectedWorkers:
    """Reserves a target's workers until `close`, and starts those that are reached over SSH.

    Calls that depend on the workers go through `call`, which runs them one after another in a thread of their
    own. llama.cpp aborts the process if it loses a worker, and waits forever for a worker that hangs. In both
    cases, the thread is abandoned and stays blocked until the process exits.

    A pass on workers can take seconds, so after `interrupt`, the caller soon returns without waiting for the
    pass. The thread still finishes the pass before it runs later calls.

    Args:
        machines: The machines named in `--workers`.
        library: The library that runs the target, with its version on this machine.
        progress: Called while edgespec connects. Returning False cancels the connection.

    Attributes:
        links: The reserved workers.
        local_bytes: Memory on this machine for the target's layers, in bytes.

    Raises:
        WorkerError, MemoryBudgetError, CancelledError: See `Link` and `reach_workers`. No worker stays
            reserved.
    """

    def __init__(self, machines: Machines, library: Library, progress: ConnectProgress | None = None) -> None:
        self.local_bytes = machines.local_bytes
        with ExitStack() as undo:
            links = []
            for address in undo.enter_context(reach_workers(machines.workers, progress)):
                description = f"connecting to {address}"
                links.append(wait_for(partial(Link, address, library), description, progress, Link.close))
                undo.callback(links[-1].close)
            self.links: tuple[Link, ...] = tuple(links)
            self._undo = undo.pop_all()
        self._speeds: dict[Link, LinkSpeed] = {}
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._changed = threading.Condition()
        # Which worker was lost and why, and what the user can do about it. Empty while all are connected.
        self._lost = self._next_step = ""
        self._is_interrupted = False
        self._abandoned: _Call | None = None
        threading.Thread(target=self._run, name="edgespec-workers", daemon=True).start()
        for link in self.links:
            link.watch(self.lose)

    def speed_of(self, link: Link) -> LinkSpeed:
        """Return the speed of the connection to a worker, measured on the first call. Raises WorkerError."""
        if link not in self._speeds:
            self._speeds[link] = measure_link(link.address)
        return self._speeds[link]

    @property
    def is_lost(self) -> bool:
        """Whether a worker was lost. After that, no llama.cpp object may be used or freed."""
        return bool(self._lost)

    @property
    def _is_stuck(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._abandoned is not None and not self._abandoned.is_done

    def call(self, work: Callable[[], _Result], *, can_abandon: bool = False) -> _Result:
        """Run `work` in the thread and return its result, or re-raise its exception.

        Args:
            work: The call.
            can_abandon: Whether an interrupt can abandon the call while it runs. A call that is still waiting
                for an abandoned one can always be abandoned.

        Raises:
            WorkerLostError: A worker was lost, before this call or during it.
            CancelledError: The call was abandoned.
        """
        call = _Call(work)
        self._calls.put(call)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    call.is_done or self._lost or (self._is_interrupted and (can_abandon or self._is_stuck))
                )
            )
            if not self._changed.wait_for(lambda: call.is_done or self._lost, _INTERRUPT_SECONDS):
                call.is_abandoned, self._abandoned = True, call
                raise CancelledError("the model's computation was cancelled")
        if not call.is_done:
            raise WorkerLostError(self._lost, self._next_step)
        if call.error is not None:
            raise call.error
        result: _Result = call.result
        return result

    def interrupt(self, enabled: bool) -> None:
        """Abandon the current pass and all later ones until called with False."""
        with self._changed:
            self._is_interrupted = enabled
            self._changed.notify_all()

    def run_later(self, work: Callable[[], None]) -> None:
        """Queue `work` to run in the thread after all earlier calls, without waiting for it."""
        self._calls.put(_Call(work))

    def lose(self, what: str, next_step: str) -> None:
        """Make the current call and all later ones fail. Can be called from any thread.

        Only the first call sets the message.

        Args:
            what: Which worker was lost, and why.
            next_step: What the user can do about it.
        """
        with self._changed:
            if not self._lost:
                self._lost, self._next_step = what, next_step
            self._changed.notify_all()

    def report_abort(self) -> None:
        """Make all calls fail because llama.cpp has lost the connection to a worker."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, _REASON_SECONDS)
        names = ", ".join(str(link.address) for link in self.links)
        self.lose(f"lost the connection to a worker ({names})", self.links[0].address.restart_advice)

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Stop the thread after all earlier calls, and release the workers.

        Args:
            last: A final call to run. Skipped if a worker was lost or an abandoned call does not return.
        """
        try:
            if last is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._lost or not self._is_stuck, _CLOSE_SECONDS)
                if not self._is_stuck:
                    with suppress(WorkerLostError):
                        self.call(last)
            self._calls.put(None)
        finally:
            self._undo.close()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._lost:
                continue
            if not call.is_abandoned:
                try:
                    call.result = call.work()
                except BaseException as error:
                    call.error = error
            with self._changed:
                call.is_done = True
                self._changed.notify_all()
            # Drop the reference, so that the call's result is freed while waiting for the next call.
            del call
