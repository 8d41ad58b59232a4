"""Compile each new constraint in a child process first, because some crash llguidance or take minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread

from edgespec.errors import CapabilityError, EdgespecError
from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["ConstraintTrial", "borrowed_trial"]

# Maximum CPU time in seconds for compiling a constraint. A schema of 250,000 characters takes about 1 second.
_CPU_SECONDS = 5.0
# Maximum time in seconds to wait for the child process, which may get little CPU time.
_MAX_SECONDS = 30.0
# Seconds to wait for a crashed process to exit.
_EXIT_SECONDS = 5.0
# Maximum number of constraints to compile concurrently. More than one, so that a slow constraint does not
# delay all others.
_MAX_TRIALS = 2


class ConstraintTrial:
    """A child process that tries to compile constraints. It is started for the first one.

    Not thread-safe. The child process exits when this object is deleted or the parent process exits.
    """

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def run(self, option: str, text: str) -> int | str:
        """Compile a constraint in the child process.

        The result does not say whether the constraint is valid. That can be checked without a child process.

        Args:
            option: Name of the option that sets the constraint: `schema`, `regex`, `grammar` or `choice`.
            text: The constraint as text, from `text_of`.

        Returns:
            The approximate memory of the compiled constraint in bytes, or the reason why compiling it failed.

        Raises:
            CapabilityError: The process cannot be started.
        """
        if self._process is None or not self._process.alive:
            self._process = _start()
        process, answers = self._process, SimpleQueue[bytes]()

        def exchange() -> None:
            answer = b""
            with suppress(OSError, ValueError):
                process.stdin.write(json.dumps([option, text, _CPU_SECONDS]).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            answers.put(answer)

        Thread(target=exchange, name="edgespec-constraint-trial", daemon=True).start()
        try:
            if answer := answers.get(timeout=_MAX_SECONDS):
                return int(answer)
        except Empty:
            process.close()
            return f"compiling it takes more than {_MAX_SECONDS:.0f} seconds"
        # The process has closed its output, so it is about to exit. Its exit status tells why.
        process.wait(_EXIT_SECONDS)
        process.close()
        if process.exceeded_cpu_limit:
            return f"compiling it takes more than {_CPU_SECONDS:g} seconds"
        return "it is nested too deeply, or needs too much memory"

    def close(self) -> None:
        """Stop the child process."""
        if self._process:
            self._process.close()


_places = BoundedSemaphore(_MAX_TRIALS)
# Keep at most one idle child process, which all models share, because each uses about 40 MiB.
_idle: list[ConstraintTrial] = []
_lock = Lock()


@contextmanager
def borrowed_trial() -> Iterator[ConstraintTrial]:
    """Provide a trial for exclusive use. If two are already in use, wait for one of them."""
    with _places:
        try:
            trial = _idle.pop()
        except IndexError:
            trial = ConstraintTrial()
        try:
            yield trial
        finally:
            with _lock:
                is_surplus = bool(_idle)
                if not is_surplus:
                    _idle.append(trial)
            if is_surplus:
                trial.close()


def _start() -> ChildProcess:
    try:
        return ChildProcess(module_arguments("edgespec.constraints.trial_worker"))
    except EdgespecError as error:
        raise CapabilityError(
            f"constraints cannot be used: {error.what}", error.next_step, code=error.code
        ) from error
