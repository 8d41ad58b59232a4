"""Start workers on other machines with the system's `ssh`, and reach them through its tunnel."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeAlias

from edgespec.cluster.machines import LOOPBACK, STDIN_SILENCE_SECONDS, SshAddress, WorkerAddress
from edgespec.errors import CancelledError, WorkerError, shorten

__all__ = ["ConnectProgress", "reach_workers"]

# Called with a description and a fraction. Returning False cancels the connection.
ConnectProgress: TypeAlias = Callable[[str, float], bool]

_SSH = "ssh"
_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=3",
    "-o", "ServerAliveCountMax=2",
    "-o", "ExitOnForwardFailure=yes",
    "-o", "LogLevel=ERROR",
    # Do not share a connection with other ssh commands, because its tunnel would stay open after this command
    # exits.
    "-o", "ControlMaster=no",
    "-o", "ControlPath=none",
)  # fmt: skip
# A login shell sets PATH as in a terminal. We add ~/.local/bin, because some systems omit it.
_COMMAND = """exec $SHELL -lc 'exec env PATH="$PATH:$HOME/.local/bin" edgespec worker --listen {address}'"""
# Worker ports, chosen outside the ranges from which Linux and macOS assign ephemeral ports.
_WORKER_PORTS = range(20000, 32768)
# Number of attempts to start a worker, because another program can take one of the two ports before it is
# used.
_ATTEMPTS = 4
# Startup time limit in seconds. Importing llama.cpp takes seconds on a slow disk, and initialising a GPU can
# take longer.
_START_SECONDS = 60.0
# Seconds between checks for cancellation while waiting.
_POLL_SECONDS = 0.1
# Seconds that workers and `ssh` processes have to exit before `ssh` is killed.
_END_SECONDS = 5.0
_MAX_LINE_BYTES = 65536
_KEPT_ERROR_LINES = 20
# Maximum length of a quoted error message in characters.
_MAX_SHOWN_CHARACTERS = 300
# Exit statuses of `ssh` for its own errors and of a shell that cannot find the command.
_SSH_FAILED, _NOT_FOUND = 255, 127


class _PortTakenError(Exception):
    """Raised when another program uses a port that was chosen for the tunnel."""


@contextmanager
def reach_workers(
    machines: Sequence[WorkerAddress | SshAddress], progress: ConnectProgress | None = None
) -> Iterator[tuple[WorkerAddress, ...]]:
    """Yield the addresses at which workers can be reached.

    Starts a worker on the machine of each `SshAddress`. These workers start in parallel, and stop at the end
    of the `with` block.

    Args:
        machines: The machines in `--workers`.
        progress: Called while `ssh` connects.

    Raises:
        WorkerError: `ssh` cannot connect, or a worker does not start.
        CancelledError: `progress` returned False.
    """
    started: dict[SshAddress, _Ssh] = {}
    try:
        for machine in machines:
            if isinstance(machine, SshAddress):
                started[machine] = _Ssh(machine)
        _wait_for_workers(started, progress)
    except BaseException:
        for ssh in started.values():
            ssh.kill()
        raise
    try:
        yield tuple(
            started[each].worker_address if isinstance(each, SshAddress) else each for each in machines
        )
    finally:
        end = time.monotonic() + _END_SECONDS
        for ssh in started.values():
            ssh.end_worker()
        for ssh in started.values():
            ssh.close(end)


def _wait_for_workers(started: dict[SshAddress, _Ssh], progress: ConnectProgress | None) -> None:
    """Wait until all workers are running. If an `ssh` process's ports are taken, restart it with others.

    Raises the same errors as `reach_workers`.
    """
    attempts = dict.fromkeys(started, 1)
    waiting = list(started)
    end = time.monotonic() + _START_SECONDS
    while waiting:
        done = 1.0 - len(waiting) / len(started)
        if progress is not None and not progress(f"connecting to {waiting[0]}", done):
            raise CancelledError(f"connecting to {waiting[0]} was cancelled")
        if time.monotonic() > end:
            raise WorkerError(
                f"the worker on {waiting[0]} did not start within {_START_SECONDS:g} seconds",
                f"run `ssh {waiting[0]} edgespec worker` to see why",
                code="worker_not_started",
            )
        for machine in tuple(waiting):
            try:
                if started[machine].has_started(_POLL_SECONDS / len(waiting)):
                    waiting.remove(machine)
            except _PortTakenError as error:
                started[machine].kill()
                if attempts[machine] == _ATTEMPTS:
                    raise WorkerError(
                        f"no free port was found for the worker on {machine}: {error}",
                        "if ~/.ssh/config forwards a port for this host, close other SSH connections to it",
                        code="worker_not_started",
                    ) from error
                attempts[machine] += 1
                started[machine] = _Ssh(machine)


class _Ssh:
    """An `ssh` process that runs a worker on another machine and forwards a local port to it.

    This machine chooses the worker's port, because `ssh` opens the tunnel before the worker starts. If
    another program uses the port, the worker fails to start, so a running worker's tunnel always leads to
    that worker.
    """

    def __init__(self, machine: SshAddress) -> None:
        self._machine = machine
        self._worker_port = _random_port()
        self._local_port = _free_port()
        tunnel = f"{LOOPBACK}:{self._local_port}:{LOOPBACK}:{self._worker_port}"
        command = _COMMAND.format(address=f"{LOOPBACK}:{self._worker_port}")
        try:
            # Ctrl-C in the terminal cancels a reply and must not kill `ssh`, so run `ssh` in its own session.
            self._process = subprocess.Popen(
                [_SSH, *_OPTIONS, "-L", tunnel, machine.url, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(
                f"cannot start the program `ssh` to connect to {machine}: {error.strerror}",
                "install OpenSSH here, or start `edgespec worker` there yourself and use its host:port",
                code="worker_not_started",
            ) from error
        assert self._process.stdin
        self._stdin = self._process.stdin
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        # The error that the worker printed on stdout, or {} if it printed none.
        self._error: dict[str, Any] = {}
        self._errors: deque[bytes] = deque(maxlen=_KEPT_ERROR_LINES)
        self._readers = [
            threading.Thread(target=_read_lines, args=(stream, add), name="edgespec-ssh", daemon=True)
            for stream, add in (
                (self._process.stdout, self._lines.put),
                (self._process.stderr, self._errors.append),
            )
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._show_life, name="edgespec-ssh", daemon=True).start()

    @property
    def worker_address(self) -> WorkerAddress:
        """The local end of the tunnel to the worker."""
        return WorkerAddress(LOOPBACK, self._local_port, self._machine.memory_bytes, str(self._machine))

    def has_started(self, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` for the worker's status line, and return whether it arrived.

        Raises:
            WorkerError: `ssh` or the worker exited.
            _PortTakenError: Another program uses one of the ports.
        """
        end = time.monotonic() + timeout_seconds
        with suppress(Empty):
            while True:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
                if not line:
                    raise self._failure()
                # A login shell may print other lines first.
                printed = _printed(line)
                if printed.get("port") == self._worker_port:
                    return True
                if isinstance(error := printed.get("error"), dict):
                    self._error = error
        return False

    def _failure(self) -> Exception:
        """Return an exception that says why `ssh` exited."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._readers[1].join(_END_SECONDS)
        lines = [_printable(line.decode("utf-8", "replace")) for line in self._errors]
        text = "\n".join(lines)
        last = _shown(next(filter(None, reversed(lines)), "it gave no reason").rstrip("."))
        status = self._process.returncode
        if status == _SSH_FAILED:
            return _connection_error(self._machine, text, last)
        if status == _NOT_FOUND:
            return WorkerError(
                f"edgespec is not installed on {self._machine}, or is not on its PATH: {last}",
                "install it there with `scripts/setup workers`, then run `mkdir -p ~/.local/bin && ln -s"
                " $PWD/.venv/bin/edgespec ~/.local/bin/` in its source folder",
                code="worker_not_started",
            )
        if self._error.get("code") == "address_unavailable":
            return _PortTakenError(last)
        # Wrong arguments and programs other than `edgespec worker` are reported only as text. Prefer the line
        # with the error to the line with the usage after it.
        own = next((line for line in lines if line.startswith("error: ")), last).removeprefix("error: ")
        what, next_step = (_shown(self._error.get(key) or "") for key in ("message", "next_step"))
        return WorkerError(
            f"the worker on {self._machine} did not start: {what or own}",
            next_step,
            code="worker_not_started",
        )

    def _show_life(self) -> None:
        """Send heartbeats to the worker's stdin until stdin is closed."""
        with suppress(OSError, ValueError):
            while True:
                self._stdin.write(b"\n")
                self._stdin.flush()
                time.sleep(STDIN_SILENCE_SECONDS / 12)

    def end_worker(self) -> None:
        """Stop the worker by closing its stdin, without waiting for it."""
        with suppress(OSError):
            self._stdin.close()

    def close(self, end: float) -> None:
        """Wait until the worker has exited and freed its memory, but no later than `end` (monotonic time)."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill `ssh`. The other machine then closes the worker's stdin, which stops the worker."""
        self._process.kill()
        self._process.wait()
        self.end_worker()


def _connection_error(machine: SshAddress, text: str, last: str) -> Exception:
    # `ssh` exits with the same status for all of its own errors, so only the text tells them apart.
    if "Address already in use" in text or "forwarding failed" in text:
        return _PortTakenError(last)
    by_hand = f"set up SSH so that `ssh {machine}` connects without asking for a password or anything else"
    if "Permission denied" in text or "Too many authentication failures" in text:
        return WorkerError(f"{machine} refused the SSH key: {last}", by_hand, code="access_denied")
    if "Host key verification failed" in text:
        return WorkerError(
            f"the host key of {machine} is not known or has changed: {last}", by_hand, code="access_denied"
        )
    return WorkerError(f"{machine} is unreachable by SSH: {last}", by_hand)


def _random_port() -> int:
    return random.choice(_WORKER_PORTS)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def _printable(text: object) -> str:
    return "".join(filter(str.isprintable, str(text))).strip()


def _shown(text: object) -> str:
    return shorten(_printable(text), _MAX_SHOWN_CHARACTERS)


def _printed(line: bytes) -> dict[str, Any]:
    """Return the JSON object that the worker printed, or {} if the line is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_lines(stream: IO[bytes], add: Callable[[bytes], None]) -> None:
    """Pass each line of the stream to `add`, followed by empty bytes once the stream ends."""
    with suppress(OSError, ValueError), stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            add(line)
    add(b"")
