"""Run Python in a child process, for work that could crash, hang or exhaust memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from edgespec.errors import EdgespecError

_CRASH_NAMES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
# Signals that end a process because its code or its input is faulty. Windows lacks some of them.
CRASH_SIGNALS = frozenset(each for each in signal.Signals if each.name in _CRASH_NAMES)


class ChildProcess:
    """A Python process that reads requests from its stdin and writes replies to its stdout.

    The process stops when this object is closed or garbage-collected. It should also exit when its stdin is
    closed, which happens when the parent process exits. `close` can be called from any thread.

    Args:
        arguments: Arguments for the Python interpreter: a script or code, followed by its own arguments.
        open_files: File descriptors that the process inherits. Not supported on Windows.
        errors: File that receives the process's stderr. If None, stderr is discarded.
        environment: Environment variables to set in addition to this process's own.

    Attributes:
        stdin: Stream of requests to the process.
        stdout: Stream of replies from the process.

    Raises:
        EdgespecError: The process cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        open_files: Sequence[int] = (),
        errors: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # In a frozen program, such as one made with PyInstaller, sys.executable is not a Python interpreter.
        if not sys.executable or getattr(sys, "frozen", False):
            raise EdgespecError(
                "no Python interpreter was found to start a child process",
                "set sys.executable to a Python interpreter",
                code="process_not_started",
            )
        try:
            # The -I option ignores the current folder and PYTHONPATH. The new session keeps the terminal's
            # Ctrl-C from reaching the process.
            self._process = subprocess.Popen(
                [sys.executable, "-I", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if errors is None else errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                pass_fds=open_files,
            )
        except OSError as error:
            raise EdgespecError(
                f"cannot start {sys.executable}: {error}",
                "check that it exists, or close other programs and try again",
                code="process_not_started",
            ) from error
        assert self._process.stdin
        assert self._process.stdout
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process in bytes, or 0 if it has exited."""
        with suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0

    @property
    def alive(self) -> bool:
        """Whether the process can still handle requests."""
        return self._end.alive and self._process.poll() is None

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Wait for the process to exit. Return its exit status, or None if the timeout expires."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_seconds)
        return None

    @property
    def exceeded_cpu_limit(self) -> bool:
        """Whether the process was killed for exceeding its CPU time limit (`ITIMER_PROF`)."""
        return sys.platform != "win32" and self._process.returncode == -signal.SIGPROF

    def close(self) -> None:
        """Stop the process. Repeated calls have no effect."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream:
                stream.close()


def module_arguments(module: str) -> list[str]:
    """Return interpreter arguments that call a module's `main`, with this process's import path."""
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
    # The child must not import modules from the current folder.
    folders = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    return ["-c", code, json.dumps(folders)]
