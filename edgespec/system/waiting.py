"""Wait for long calls in a way that lets Ctrl-C and progress callbacks interrupt the wait.

`SignalEvent` is an event for signal handlers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from edgespec.errors import CancelledError

_Result = TypeVar("_Result")
_POLL_SECONDS = 0.05


class SignalEvent:
    """An event that a signal handler may set. Only one thread may wait for it.

    A signal handler runs in the main thread, between any two of its instructions. If it interrupts a method
    of a `threading.Event` and calls `set` on the same event, it waits forever for the event's lock, which its
    own thread holds.
    """

    def __init__(self) -> None:
        self._is_set = False
        # `SimpleQueue.put` has no such lock, and may interrupt any method of the same queue.
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._wakes.put(None)

    def clear(self) -> None:
        self._is_set = False
        with suppress(Empty):
            while True:
                self._wakes.get_nowait()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the event is set or the time is up. Return whether it is set."""
        if not self._is_set:
            with suppress(Empty):
                self._wakes.get(timeout=timeout_seconds)
        return self._is_set


def wait_for(
    work: Callable[[], _Result],
    poll: Callable[[], None],
    discard: Callable[[_Result], None] = lambda _: None,
) -> _Result:
    """Run `work` in another thread and return its result.

    Args:
        work: The call to wait for. It keeps running in its thread if the wait ends early.
        poll: Called every 50 ms while `work` runs. If it raises an exception, the wait ends.
        discard: Called with the result of `work` if the wait ended early.
    """
    # Importing this module takes 10 ms, and `edgespec --help` does not need it.
    from concurrent.futures import Future, wait

    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    def end(outcome: Future[_Result]) -> None:
        if outcome.exception() is None:
            discard(outcome.result())

    threading.Thread(target=run, name="edgespec-wait", daemon=True).start()
    try:
        while not wait([outcome], _POLL_SECONDS).done:
            poll()
    except BaseException:
        outcome.add_done_callback(end)
        raise
    return outcome.result()


def check_cancelled(progress: Callable[[str, float], bool] | None) -> None:
    """Report that a prompt is being prepared. Raises CancelledError if `progress` returns False."""
    if progress and not progress("preparing the prompt", 0.0):
        raise CancelledError("the reply was cancelled while its prompt was being prepared")
