"""Memory pressure: memory that is given back while other programs need it.

There are two steps. Cached prefixes are dropped first, between replies and during one. If that is not
enough, the context is shrunk while edgespec is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter as now

from edgespec.files import format_bytes
from edgespec.heap import release_free_memory
from edgespec.memory.budget import DEFAULT_RESERVE_BYTES, available_bytes
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache import SegmentStore

__all__ = ["MemoryPressure"]

# Asking the system takes a third of a millisecond, so a reply asks at most once in this time.
_CHECK_SECONDS = 1.0


class MemoryPressure:
    """Gives memory back while the system has less free than the reserve.

    Belongs to the thread that runs the model.

    Attributes:
        available: returns the bytes that are free now.
        notice: what was given back since the last reply and during this one, for people.
        last_reclaim: what was given back last, for people.
        reclaimed_bytes: everything that was given back so far.
    """

    def __init__(
        self,
        context: ResizableContext,
        store: SegmentStore | None = None,
        available: Callable[[], int] = available_bytes,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
    ) -> None:
        self.notice = self.last_reclaim = ""
        self.reclaimed_bytes = 0
        self.available = available
        self._context = context
        self._store = store
        self._reserve_bytes = reserve_bytes
        self._next_check = 0.0
        self._unreported: list[str] = []

    @property
    def is_low(self) -> bool:
        """Whether other programs need memory now."""
        return self.available() < self._reserve_bytes

    @property
    def can_reclaim(self) -> bool:
        """Whether there is anything left to give back."""
        return self._context.can_shrink or bool(self._store and self._store.memory_bytes)

    def begin_reply(self) -> None:
        """Put what was given back since the last reply into `notice`."""
        self.notice = " · ".join(self._unreported)
        self._unreported = []

    def drop_prefixes(self) -> float:
        """Drop cached prefixes if memory is low, after writing them to disk where that is on.

        Returns:
            The seconds that this took; 0 if memory is not low.
        """
        if not (self._store and self.is_low):
            return 0.0
        started = now()
        self._report("of cached prefixes", self._store.reclaim())
        return now() - started

    def reclaim_idle(self) -> None:
        """Give memory back between replies, if it is low: cached prefixes, then unused context."""
        self.drop_prefixes()
        if self._context.can_shrink and self.is_low:
            self._report("of unused context", self._context.shrink())

    def check_during_reply(self) -> None:
        """Drop cached prefixes between two rounds if memory is low, without writing to disk.

        Call it after every round: it asks the system at most once a second.
        """
        store, clock = self._store, now()
        if store is None or clock < self._next_check:
            return
        self._next_check = clock + _CHECK_SECONDS
        if store.memory_bytes and self.is_low:
            self._report("of cached prefixes", store.reclaim(write=False))
            self.notice = " · ".join(filter(None, (self.notice, *self._unreported)))
            self._unreported = []

    def _report(self, what: str, freed_bytes: int) -> None:
        if freed_bytes <= 0:
            return
        release_free_memory()
        self.last_reclaim = f"memory was low: freed {format_bytes(freed_bytes)} {what}"
        self.reclaimed_bytes += freed_bytes
        self._unreported.append(self.last_reclaim)
