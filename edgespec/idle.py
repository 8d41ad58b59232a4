"""What drafters do between replies: they improve in a thread of its own until they are called back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from edgespec.drafters.base import Drafter
from edgespec.errors import CancelledError, EdgespecError

__all__ = ["Idle", "resting_parts"]

# Replies of a script follow one another at once, and a command ends after its reply: neither is a rest.
QUIET_SECONDS = 0.3


def resting_parts(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """The drafters in this one that use a rest."""
    return tuple(part for part in drafter.parts if part.rests) if drafter else ()


class Idle:
    """Lets drafters rest. At most one rest is wanted at a time.

    trouble: why a drafter rests no more, by its name.
    """

    def __init__(self) -> None:
        self.trouble: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, rest: Callable[[Callable[[], bool]], None]) -> None:
        """Call `rest(wanted)` in the background after a quiet moment; `wanted` turns false with `stop`."""
        self._stopped = stopped = threading.Event()

        def run() -> None:
            if not stopped.wait(QUIET_SECONDS):
                rest(lambda: not stopped.is_set())

        thread = threading.Thread(target=run, name="edgespec-rest", daemon=True)
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

    def take_turns(self, parts: Sequence[Drafter], wanted: Callable[[], bool]) -> bool:
        """Let each drafter rest once; False when one failed, which then rests no more."""
        fine = True
        for part in parts:
            if not wanted():
                break
            if part.name in self.trouble:
                continue
            try:
                part.rest(wanted)
            except CancelledError:
                break
            except Exception as error:
                fine = False
                what = error.what if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
                self.trouble[part.name] = f"{part.name} learns no more: {' '.join(what.split())}"
        return fine
