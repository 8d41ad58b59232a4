"""Ctrl-C: the work goes on in a thread of its own, so that a signal is heard inside a long native call.

Python runs signal handlers in the main thread, between two of its instructions. Were the model run there,
a Ctrl-C would have to wait for the end of the running pass.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

import click

from edgespec.cli.failures import INTERRUPTED

__all__ = ["Stop", "interruptible"]

_Result = TypeVar("_Result")


class Stop:
    """Whether the person has asked for an end, and what is to be done then."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._action: Callable[[], None] | None = None

    @property
    def requested(self) -> bool:
        """True once an end was asked for."""
        return self._event.is_set()

    def then(self, action: Callable[[], None]) -> None:
        """Do this when an end is asked for; at once if that has happened already. It may be done twice."""
        self._action = action
        if self.requested:
            action()

    def request(self) -> None:
        """Ask for an end."""
        self._event.set()
        if self._action is not None:
            self._action()


def interruptible(work: Callable[[Stop], _Result]) -> _Result:
    """Do `work` so that Ctrl-C and SIGTERM ask it to stop. Asked twice, the process ends at once."""
    from edgespec.heap import limit_malloc_arenas

    stop = Stop()
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(stop))
        except BaseException as error:
            outcome.set_exception(error)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            # The work may sit in a native call that does not return: do not wait for it.
            click.echo("interrupted", err=True)
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        stop.request()

    # A signal that was switched off, as nohup does, stays so.
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in wanted}
    limit_malloc_arenas()
    try:
        threading.Thread(target=run, name="edgespec-work", daemon=True).start()
        return outcome.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
