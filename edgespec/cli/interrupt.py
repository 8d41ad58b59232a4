"""Ctrl-C handling. Commands run in a worker thread, so that long native calls do not delay signals.

Python runs signal handlers only in the main thread, between bytecode instructions. If models ran in that
thread, Ctrl-C would take effect only after the current native call returned.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

import click

from edgespec.cli.failures import INTERRUPTED

__all__ = ["Stop", "interruptible"]

_Result = TypeVar("_Result")
_SIGNAL_SECONDS = 0.1
_STDERR = 2


class Stop:
    """A stop request that the main thread sends to the worker thread.

    Attributes:
        requested: Whether a stop was requested. It is not a `threading.Event`, because a signal handler that
            interrupts `Event.set` and calls it again waits forever for the event's lock.
    """

    def __init__(self) -> None:
        self.requested = False
        self._action: Callable[[], None] | None = None

    def on_request(self, action: Callable[[], None]) -> None:
        """Call `action` when a stop is requested, or immediately if one was already requested."""
        self._action = action
        if self.requested:
            action()

    def request(self) -> None:
        """Request a stop, and call the action set with `on_request`."""
        self.requested = True
        if self._action is not None:
            self._action()


class _WorkerThread:
    """A daemon thread that runs one call after another and never exits.

    When a thread that has used MLX exits, MLX's thread-local destructors acquire the global interpreter lock
    (GIL). If the interpreter is already shutting down, as after an error, this aborts the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` in the worker thread. `call` must not raise exceptions."""
        # Start the thread on first use, and again after a fork, which does not copy threads.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="edgespec-work", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            call()
            # Drop the reference, so that the call's models can be freed while the thread waits for the next
            # call.
            del call


_WORKER = _WorkerThread()


def interruptible(
    work: Callable[[Stop], _Result], *, first_message: str = "", second_message: str = "interrupted"
) -> _Result:
    """Run `work` in a thread and turn Ctrl-C and SIGTERM into stop requests.

    Call this function from the main thread, not from `work`. A second signal exits the process immediately
    with status 130.

    Args:
        work: Called with a `Stop`. Must return soon after a stop is requested, unless `first_message` says
            that it takes longer.
        first_message: Printed to stderr after the first signal, unless empty.
        second_message: Printed to stderr after the second signal.

    Returns:
        The result of `work`. Exceptions in `work` are raised in the caller's thread.
    """
    from concurrent.futures import Future, wait

    from edgespec.system.heap import limit_malloc_arenas

    stop = Stop()
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(stop))
        except BaseException as error:
            outcome.set_exception(error)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            # Do not wait for the running command, because a native call may hang. Write to stderr directly,
            # because the signal may have interrupted this thread while it was printing the first message.
            os.write(_STDERR, f"{_line(second_message)}\n".encode())
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        # Leave everything else to the loop below, because the signal may have interrupted this thread while
        # it held a lock that stopping the command needs.
        stop.requested = True

    # Keep ignoring signals that the parent process, such as nohup, ignores.
    handled = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in handled}
    limit_malloc_arenas()
    try:
        _WORKER.submit(run)
        has_answered = False
        # Check regularly, because a signal delivered to another thread does not wake this one.
        while not outcome.done():
            wait([outcome], timeout=_SIGNAL_SECONDS)
            if stop.requested and not has_answered:
                has_answered = True
                stop.request()
                if first_message:
                    click.echo(_line(first_message), err=True)
        return outcome.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(message: str) -> str:
    """Format a message for stderr. On a terminal, it overwrites the progress line and the echoed `^C`."""
    return f"\r\x1b[K{message}" if sys.stderr.isatty() else message
