"""Run slow functions in threads that do not delay program exit.

`asyncio.to_thread` is not used for them, because the program could not exit before its threads finish, and a
network request or a file on a network drive can hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a daemon thread of its own and return its result."""
    future: Future[_T] = Future()
    Thread(target=_call, args=(function, future), daemon=True).start()
    return await asyncio.wrap_future(future)


class CallThread:
    """Runs calls, such as file searches, one at a time in a daemon thread that the first call starts."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run `call` in the thread and return its result. If cancelled before `call` starts, skip it."""
        future: Future[_T] = Future()
        self._jobs.put(lambda: _call(call, future))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="edgespec-calls", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


def _call(function: Callable[[], _T], future: Future[_T]) -> None:
    """Set the result of `future` to that of the function, unless the future was cancelled before."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
