"""Run background work between replies, such as online training of drafters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakMethod

from edgespec.errors import CancelledError, EdgespecError
from edgespec.methods.base import Drafter
from edgespec.system.waiting import SignalEvent

__all__ = ["IdleWorker", "drafters_with_idle_work"]

# A function that runs between replies until its argument returns False.
_IdleWork: TypeAlias = Callable[[Callable[[], bool]], None]
_Watch: TypeAlias = Callable[[Callable[[], bool]], bool]

# Seconds without a reply before background work begins. Scripts usually start their next reply sooner.
QUIET_SECONDS = 0.3
# Seconds between calls to the `watch` function passed to `IdleWorker.start`.
WATCH_SECONDS = 2.0


def drafters_with_idle_work(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """Return the drafters within `drafter` that have work to do between replies, such as online training."""
    return tuple(part for part in drafter.parts if part.has_idle_work) if drafter else ()


class IdleWorker:
    """Runs work in a background thread after each reply. Owned by one session.

    Attributes:
        failures: Why idle work failed, keyed by drafter name. Failed work is not retried.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._stopped = SignalEvent()
        self._thread: threading.Thread | None = None

    def start(self, work: _IdleWork, watch: _Watch) -> None:
        """Start a thread that waits `QUIET_SECONDS`, runs `work` once, then calls `watch` repeatedly.

        Args:
            work: Called with a function `should_continue`, which returns False after `stop`.
            watch: A bound method, called every `WATCH_SECONDS` until it returns False. The thread holds only
                a weak reference to the method's object.
        """
        self._stopped = SignalEvent()
        args = (self._stopped, [work], WeakMethod(watch))
        thread = threading.Thread(target=_run, args=args, name="edgespec-idle", daemon=True)
        with suppress(RuntimeError):  # Threads cannot be started during interpreter shutdown.
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Signal the background thread to stop, without waiting for it. Can be called from any thread."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for the background thread to exit. Call `stop` first."""
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def run_drafters(self, drafters: Sequence[Drafter], should_continue: Callable[[], bool]) -> bool:
        """Call each drafter's `run_idle_work`, for example to train the drafter on recent replies.

        Returns:
            False if a drafter failed. The reason is added to `failures`.
        """
        succeeded = True
        for drafter in drafters:
            if not should_continue():
                break
            if drafter.name in self.failures:
                continue
            try:
                drafter.run_idle_work(should_continue)
            except CancelledError:
                break
            except Exception as error:
                succeeded = False
                what = error.what if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
                self.failures[drafter.name] = f"{drafter.name} stopped learning: {' '.join(what.split())}"
        return succeeded


def _run(stopped: SignalEvent, pending_work: list[_IdleWork], weak_watch: WeakMethod[_Watch]) -> None:
    def should_continue() -> bool:
        return not stopped.is_set()

    if stopped.wait(QUIET_SECONDS):
        return
    # Pop the function, so that objects that it references can be freed after the call.
    pending_work.pop()(should_continue)
    while (watch := weak_watch()) and watch(should_continue):
        watch = None
        if stopped.wait(WATCH_SECONDS):
            return
