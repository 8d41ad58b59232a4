"""Run slow functions in threads that do not delay the end of the program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

__all__ = ["in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a daemon thread and return its result.

    `asyncio.to_thread` is not used, because the program cannot end before its threads do, and a network
    request can hang.
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
