"""Run slow functions in threads that do not delay program exit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

__all__ = ["CallThread", "in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a daemon thread and return its result.

    `asyncio.to_thread` is not used, because the program could not exit before its threads finish, and a
    network request can hang.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def finish(result: _T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        # The event loop is closed if the chat ended in the meantime.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, result, failure)

    Thread(target=run, daemon=True).start()
    return await future


class CallThread:
    """Runs calls, such as file searches, one at a time in a thread that the first call starts.

    The thread is a daemon, so a call that hangs, for example on a network drive, does not prevent the program
    from exiting.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run `call` in the thread and return its result. If cancelled before `call` starts, skip it."""
        future: Future[_T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(job)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="edgespec-calls", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
