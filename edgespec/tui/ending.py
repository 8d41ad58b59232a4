"""End the chat on signals or when its terminal closes, even if it is stuck, and describe its outcome."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from threading import Thread
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.system.waiting import SignalEvent
from edgespec.tui.open_chat import OpenChat

# Signals that end the chat. Windows has no SIGHUP, the signal for a closed terminal.
_SIGNALS = [each for each in signal.Signals if each.name in ("SIGHUP", "SIGINT", "SIGTERM")]
# Seconds between checks that the terminal is still open.
_CHECK_SECONDS = 1.0
# Seconds after a signal before the process is killed, if the reply or the model has not stopped.
_FORCE_SECONDS = 20.0
# Seconds between attempts to quit while the app is still starting.
_RETRY_SECONDS = 0.05
_INTERRUPTED = 130


class ChatEnd(NamedTuple):
    """The outcome of a terminal chat.

    Attributes:
        signalled: Whether a signal ended the chat.
        resume: The value of `--resume` that opens the same chat: `last` or the chat's ID. Empty if the chat
            has no messages.
    """

    signalled: bool = False
    resume: str = ""


def resume_value(chat: OpenChat, store: ChatStore) -> str:
    """Return the `--resume` value that opens the chat, or an empty string if it has no messages."""
    if not chat.entries:
        return ""
    try:
        newest = next((each.id for each in store.list() if not each.problem), "")
    except ChatFileError:
        newest = ""
    return "last" if chat.id == newest else chat.id


def _has_terminal() -> bool:
    """Return whether stdin is an open terminal."""
    return sys.__stdin__ is not None and sys.__stdin__.isatty()


def is_input_open() -> bool:
    """Return whether stdin is still open. In `serve --chat`, it is a pipe held open by the browser's tab."""
    if _has_terminal() or sys.__stdin__ is None or sys.platform == "win32":
        return _has_terminal()
    poll = select.poll()
    poll.register(sys.__stdin__.fileno(), 0)
    return not any(event & select.POLLHUP for _, event in poll.poll(0))


class EndWatch:
    """Context manager that ends the chat on SIGHUP, SIGINT and SIGTERM, or when its terminal is closed.

    Runs in its own thread, because writing to an unresponsive terminal can block the main thread. After a
    signal, the app quits normally. If the terminal is closed, the process exits without drawing anything.

    Args:
        save: Saves the chat.
        leave: Asks the app to quit. Called after a signal, and again until it returns True. Returns False if
            the app has not started yet.
        stop: Stops the reply and closes the model. Called if the terminal is closed.
        is_open: Returns whether the terminal is open. Ignored if it returns False at the start.

    Attributes:
        signalled: True once a signal has arrived.
    """

    def __init__(
        self,
        save: Callable[[], None],
        leave: Callable[[], bool],
        stop: Callable[[], object],
        *,
        is_open: Callable[[], bool] = _has_terminal,
    ) -> None:
        self.signalled = False
        self._save = save
        self._leave = leave
        self._stop = stop
        self._arrived = SignalEvent()
        self._ended = False
        self._is_open, self._was_open = is_open, is_open()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> EndWatch:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._on_signal)
        Thread(target=self._watch, name="edgespec-end", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._arrived.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._arrived.set()

    def _watch(self) -> None:
        deadline = float("inf")
        while not self._ended:
            self._arrived.wait(_CHECK_SECONDS)
            if self._was_open and not self._is_open():
                self._save()
                self._stop()
                self._save()
                os._exit(_INTERRUPTED)
            if self._arrived.is_set() and not self._ended:
                self.signalled = True
                deadline = min(deadline, monotonic() + _FORCE_SECONDS)
                self._save()
                if self._leave():
                    self._arrived.clear()
                else:
                    sleep(_RETRY_SECONDS)
            if monotonic() > deadline:
                os._exit(_INTERRUPTED)
