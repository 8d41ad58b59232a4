"""Try to compile each new constraint in a child process, because some crash llguidance or take minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from edgespec.errors import CapabilityError

__all__ = ["ConstraintTrial"]

# Code of the child process. It must not import modules from the current folder.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from edgespec.constraints.trial_worker import main; main()"
)
# Maximum CPU time in seconds for compiling a constraint. A schema of 250,000 characters takes about 1 second.
_CPU_SECONDS = 5.0
# Seconds after which to give up if the child process gets little CPU time.
_MAX_SECONDS = 30.0
# Seconds that a crashed process can take to exit.
_EXIT_SECONDS = 5.0


class ConstraintTrial:
    """A child process that compiles constraints on trial. It starts with the first constraint.

    Use it from one thread at a time. The process ends with this object, and with the process that owns it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, option: str, text: str) -> int | str:
        """Compile a constraint in the child process.

        Whether the constraint is valid does not matter. llguidance says that without a trial.

        Args:
            option: The option of the constraint.
            text: The text from `text_of`.

        Returns:
            The approximate memory of the compiled constraint in bytes, or why compiling it failed.

        Raises:
            CapabilityError: The process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            self._end = weakref.finalize(self, _end, self._process)
        process, answers = self._process, SimpleQueue[str]()

        def exchange() -> None:
            answer = ""
            with suppress(OSError, ValueError):
                assert process.stdin
                assert process.stdout
                process.stdin.write(json.dumps([option, text, _CPU_SECONDS]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            answers.put(answer)

        Thread(target=exchange, name="edgespec-constraint-trial", daemon=True).start()
        try:
            if answer := answers.get(timeout=_MAX_SECONDS):
                return int(answer)
        except Empty:
            self._end()
            return f"compiling it takes more than {_MAX_SECONDS:.0f} seconds"
        # The process has closed its output, so it is about to exit. Its status says why.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
        self._end()
        if sys.platform != "win32" and process.returncode == -signal.SIGPROF:
            return f"compiling it takes more than {_CPU_SECONDS:g} seconds"
        return "it is nested too deeply, or needs too much memory"


def _start() -> subprocess.Popen[str]:
    # In a frozen program, such as one made with PyInstaller, sys.executable is not a Python interpreter.
    if not sys.executable or getattr(sys, "frozen", False):
        raise CapabilityError(
            "constraints cannot be used: no Python interpreter was found to check them in",
            "set sys.executable to a Python interpreter",
        )
    try:
        # In a new session, the process does not receive the terminal's Ctrl-C.
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, json.dumps(_import_folders())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
    except OSError as error:
        raise CapabilityError(
            f"constraints cannot be used: {sys.executable} cannot be started: {error}", "close other programs"
        ) from error


def _import_folders() -> list[str]:
    return [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream:
                stream.close()
