"""Wait for a slow call until it ends or the user cancels the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from edgespec.errors import CancelledError

__all__ = ["ConnectProgress", "wait_for"]

_Result = TypeVar("_Result")
# Called with a description and a fraction. Returning False cancels the connection.
ConnectProgress: TypeAlias = Callable[[str, float], bool]
# How often the wait checks whether it was cancelled.
_POLL_SECONDS = 0.1


def wait_for(
    work: Callable[[], _Result],
    description: str,
    progress: ConnectProgress | None,
    discard: Callable[[_Result], None] = lambda _: None,
) -> _Result:
    """Return the result of `work`, which runs in a thread. Exceptions are raised here.

    Args:
        work: The call. It keeps running if the wait is cancelled.
        description: What the call does, such as `connecting to host:port`.
        progress: Called while the wait lasts.
        discard: Called with the result if the wait ended early.

    Raises:
        CancelledError: `progress` returned False.
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
        while not outcome.done():
            if progress is not None and not progress(description, 0.0):
                raise CancelledError(f"{description} was cancelled")
            wait([outcome], _POLL_SECONDS)
    except BaseException:
        outcome.add_done_callback(end)
        raise
    return outcome.result()
