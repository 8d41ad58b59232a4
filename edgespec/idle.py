"""What is done between replies in a thread of its own: drafters improve, memory is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakMethod

from edgespec.drafters.base import Drafter
from edgespec.errors import CancelledError, EdgespecError

__all__ = ["IdleWorker", "drafters_with_idle_work"]

# Called with what tells whether it is still wanted; a watch says whether it is to be called again.
_Rest: TypeAlias = Callable[[Callable[[], bool]], None]
_Watch: TypeAlias = Callable[[Callable[[], bool]], bool]

# Replies of a script follow one another at once, and a command ends after its reply: neither is a rest.
QUIET_SECONDS = 0.3
# Then it is looked so often whether other programs need memory.
WATCH_SECONDS = 2.0


def drafters_with_idle_work(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """The drafters in this one that use a rest."""
    return tuple(part for part in drafter.parts if part.has_idle_work) if drafter else ()


class IdleWorker:
    """A rest after each reply, in a thread: it is used once, then memory is watched, until `stop`.

    trouble: why a drafter rests no more, by its name.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, rest: _Rest, watch: _Watch) -> None:
        """Call `rest(wanted)` in the background after a quiet moment; `wanted` turns false with `stop`.

        Then `watch(wanted)` now and then, until it is false: a method, whose owner is not kept for it.
        """
        self._stopped = stopped = threading.Event()
        thread = threading.Thread(
            target=_use_quiet, args=(stopped, [rest], WeakMethod(watch)), name="edgespec-idle", daemon=True
        )
        with suppress(RuntimeError):  # the process ends: nobody will ask again
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """The rest is over, from any thread; what runs ends with its present step."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until nothing runs; after `stop`."""
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def run_drafters(self, parts: Sequence[Drafter], wanted: Callable[[], bool]) -> bool:
        """Let each drafter rest once; False when one failed, which then rests no more."""
        fine = True
        for part in parts:
            if not wanted():
                break
            if part.name in self.failures:
                continue
            try:
                part.run_idle_work(wanted)
            except CancelledError:
                break
            except Exception as error:
                fine = False
                what = error.what if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
                self.failures[part.name] = f"{part.name} learns no more: {' '.join(what.split())}"
        return fine


def _use_quiet(stopped: threading.Event, rests: list[_Rest], watching: WeakMethod[_Watch]) -> None:
    def wanted() -> bool:
        return not stopped.is_set()

    if stopped.wait(QUIET_SECONDS):
        return
    rests.pop()(wanted)  # from here on nothing of it is held
    while (watch := watching()) and watch(wanted):
        watch = None
        if stopped.wait(WATCH_SECONDS):
            return
