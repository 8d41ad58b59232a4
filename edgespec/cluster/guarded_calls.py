"""Run calls that may never return in a thread, so that their caller can go on when a worker is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from edgespec.errors import WorkerLostError

__all__ = ["GuardedCalls"]

_Result = TypeVar("_Result")


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None


class GuardedCalls:
    """Runs calls one after another in its own thread.

    llama.cpp ends the process if it loses a worker, and waits forever for a worker that hangs. In both cases,
    the thread that called llama.cpp is abandoned. It stays blocked until the process ends.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._lost = self._next_step = ""
        self._thread = threading.Thread(target=self._run, name="edgespec-workers", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether `fail` was called."""
        return bool(self._lost)

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which runs in the thread. Exceptions are raised here.

        Raises:
            WorkerLostError: `fail` was called, before this call or during it.
        """
        call = _Call(work)
        self._calls.put(call)
        with self._changed:
            self._changed.wait_for(lambda: call.is_done or self._lost)
        if not call.is_done:
            raise WorkerLostError(self._lost, self._next_step)
        if call.error is not None:
            raise call.error
        result: _Result = call.result
        return result

    def fail(self, what: str, next_step: str) -> None:
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

    def wait_for_failure(self, timeout_seconds: float) -> None:
        """Wait until `fail` is called, but not longer than `timeout_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout_seconds)

    def close(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._lost:
                continue
            try:
                call.result = call.work()
            except BaseException as error:
                call.error = error
            with self._changed:
                call.is_done = True
                self._changed.notify_all()
            # Free the call's result while waiting for the next call.
            del call
