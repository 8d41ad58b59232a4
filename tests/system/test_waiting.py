"""Events that signal handlers set, at whatever point they interrupt the main thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.decode.idle import IdleWorker
from edgespec.system.waiting import SignalEvent
from edgespec.tui.ending import EndWatch
from edgespec.tui.plain_console import PlainConsole
from edgespec.tui.worker import ModelThread
from tests.tables import runtime, table

_Pair = tuple[Callable[[], object], Callable[[], object]]


def _set() -> _Pair:
    event = SignalEvent()
    return event.set, event.set


def _clear() -> _Pair:
    event = SignalEvent()
    event.set()
    return event.clear, event.set


def _wait() -> _Pair:
    event = SignalEvent()
    return lambda: event.wait(0.01), event.set


def _idle_work() -> _Pair:
    worker = IdleWorker()
    return worker.stop, worker.stop


def _session() -> _Pair:
    model = runtime(table(1))
    return model.cancel, model.cancel


def _reply() -> _Pair:
    stream = runtime(table(1)).stream_tokens([0, 1], max_tokens=2)
    return stream.cancel, stream.cancel


def _next_reply() -> _Pair:
    thread = ModelThread(lambda *_: pytest.fail("no model is loaded"))
    return lambda: thread.submit(lambda *_: None), thread.cancel


def _load() -> _Pair:
    thread = ModelThread(lambda *_: pytest.fail("no model is loaded"))
    return thread.cancel_load, thread.cancel_load


def _command() -> _Pair:
    console = PlainConsole(lambda: None)
    return console.interrupted.clear, lambda: console.on_interrupt(2, None)


def _end() -> _Pair:
    watch = EndWatch(lambda: None, lambda: True, lambda: None, is_open=lambda: False)
    return lambda: watch.__exit__(None, None, None), lambda: watch._on_signal(2, None)


@pytest.mark.parametrize(
    "make",
    [_set, _clear, _wait, _idle_work, _session, _reply, _next_reply, _load, _command, _end],
    ids=lambda make: make.__name__,
)
def test_a_signal_can_arrive_anywhere(make: Callable[[], _Pair]) -> None:
    """The signal's handler runs at each call and return in the interrupted code."""
    work, on_signal = make()

    def interrupt(_frame: object, _event: str, _argument: Any) -> None:
        on_signal()

    def run() -> None:
        sys.setprofile(interrupt)
        work()
        sys.setprofile(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_waiting_thread_is_woken() -> None:
    event, woken = SignalEvent(), []
    thread = threading.Thread(target=lambda: woken.append(event.wait(60)))
    thread.start()
    event.set()
    thread.join(20)
    assert woken == [True]


def test_an_event_stays_set_until_it_is_cleared() -> None:
    event = SignalEvent()
    assert not event.wait(0)
    for _ in range(2):
        event.set()
        assert event.is_set()
        assert event.wait(0)
        assert event.wait(0)
    event.clear()
    assert not event.is_set()
    assert not event.wait(0)
