"""Start, query and stop the child process that runs the inputs of one subject."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.fuzzing.worker import PRODUCT

_ROOT = Path(__file__).resolve().parents[2]
_CHECK_SECONDS = 0.25  # between checks of the worker's memory
_FRAME = re.compile(rf'File "{re.escape(PRODUCT)}([\w/]+\.py)", line \d+ in (\w+)')


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one input. A run that exceeds a limit is stopped and counts as a finding."""

    seconds: float = 10.0
    resident_bytes: int = 3 << 30


# Importing a subject does not count as an input. Its limits are generous enough for a busy machine.
_START = Limits(seconds=60.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one input.

    Attributes:
        kind: `accepted` or `rejected`, which are fine, or else `crash`, `hang`, `traceback` or `memory`.
        signature: Identifies the failure. Inputs that fail for the same reason usually share a signature.
        detail: The traceback or the worker's last messages.
        resident_bytes: The worker's resident memory after the input. 0 if the worker was stopped.
    """

    kind: str
    signature: str = ""
    detail: str = ""
    resident_bytes: int = 0

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("accepted", "rejected")


class WorkerProcess:
    """A worker process that starts with the first input and restarts after each failure."""

    def __init__(self, functions: str, subject: str, limits: Limits) -> None:
        self._functions, self._subject, self._limits = functions, subject, limits
        shared_memory = Path("/dev/shm")  # Use a RAM disk if available.
        self._folder = tempfile.TemporaryDirectory(
            prefix="edgespec-fuzz-", dir=shared_memory if shared_memory.is_dir() else None
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(self, **request: Any) -> Outcome:
        """Run one input, given its `seed` and `number`, or the `folder` that contains it."""
        process = self._process or self._start()
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        outcome = self._answer(process, self._limits)
        if outcome.is_finding and outcome.kind != "traceback":
            self.stop()
        return outcome

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        """Kill the process and delete its files."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = Path(self._folder.name)
        own = {name: str(folder / name) for name in ("config", "data", "cache")}
        environment = os.environ | {
            **{f"EDGESPEC_{name.upper()}_DIR": path for name, path in own.items()},
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": own["cache"],
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        }
        arguments = [self._functions, self._subject, str(folder)]
        command = [sys.executable, "-m", "scripts.fuzzing.worker", *arguments]
        with (folder / "messages").open("wb") as messages:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                cwd=_ROOT,
                env=environment,
                start_new_session=True,
            )
        self._buffer = b""
        started = self._answer(self._process, _START)
        if started.kind != "started":
            self.stop()
            raise RuntimeError(f"the worker of {self._subject} failed to start: {started.detail}")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], limits: Limits) -> Outcome:
        assert process.stdout
        end = time.monotonic() + limits.seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], _CHECK_SECONDS)
            if ready:
                received = os.read(process.stdout.fileno(), 1 << 16)
                if not received:
                    return self._crash(process)
                self._buffer += received
            elif time.monotonic() > end:
                return self._hang(process)
            elif (used := _resident_bytes(process.pid)) > limits.resident_bytes:
                return Outcome("memory", "too much memory", f"{used >> 20} MiB were in use")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        return Outcome(answer.pop("outcome"), **answer)

    def _crash(self, process: subprocess.Popen[bytes]) -> Outcome:
        status = process.wait()
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Outcome("crash", f"{name} in {self._place()}", self._messages())

    def _hang(self, process: subprocess.Popen[bytes]) -> Outcome:
        # SIGABRT makes Python's fault handler print where the program hangs.
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        return Outcome("hang", f"hang in {self._place()}", self._messages())

    def _messages(self) -> str:
        path = Path(self._folder.name) / "messages"
        return path.read_bytes()[-4000:].decode("utf-8", "replace")

    def _place(self) -> str:
        """Return the innermost function of edgespec in the fault handler's output."""
        found = _FRAME.search(self._messages())
        return ", ".join(found.groups()) if found else "unknown place"


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total
