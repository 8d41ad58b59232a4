"""Wait for long calls in a way that lets Ctrl-C and progress callbacks interrupt the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from edgespec.errors import CancelledError

__all__ = ["check_cancelled", "wait_for"]

_Result = TypeVar("_Result")
_POLL_SECONDS = 0.05


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
