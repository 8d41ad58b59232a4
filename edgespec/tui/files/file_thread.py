"""A thread that searches and reads files, so that slow disks do not block the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

__all__ = ["FileThread"]

_T = TypeVar("_T")


class FileThread:
    """Runs calls one after another in a thread. The first call starts the thread.

    It is a daemon thread, so that the program can exit even if a network drive does not respond.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run `call` in the thread and return its result. Cancelling skips calls that have not started."""
        future: Future[_T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(job)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="edgespec-files", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
