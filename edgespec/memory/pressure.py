"""Free memory when other programs need it.

Cached prefixes are evicted first, both between and during replies. If that is not enough, the context shrinks
while edgespec is idle. A model that runs from disk reads fewer layers ahead, or keeps fewer experts.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter as now

from edgespec.memory.budget import available_bytes
from edgespec.memory.constants import CHECK_SECONDS, DEFAULT_RESERVE_BYTES, PRESSURE_SHARE
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache.store import SegmentStore
from edgespec.system.files import format_bytes
from edgespec.system.heap import release_free_memory

__all__ = ["MemoryPressure"]


class MemoryPressure:
    """Frees memory when free system memory falls below the reserve for other programs.

    Use only on the thread that runs the model.

    Attributes:
        available: Returns the bytes currently free.
        notice: User-facing summary of the memory freed since the end of the previous reply.
        last_reclaim: User-facing description of the memory freed most recently.
        reclaimed_bytes: Total number of bytes freed so far.
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
        # The model keeps the function, so it must not refer to this object, which refers to the model.
        context.watch_memory(lambda: available() - int(PRESSURE_SHARE * reserve_bytes))

    @property
    def is_low(self) -> bool:
        """Whether free memory is below the reserve for other programs."""
        return self.available() < self._reserve_bytes

    @property
    def can_reclaim(self) -> bool:
        """Whether cached prefixes can be evicted or the context can shrink."""
        return self._context.can_shrink or bool(self._store and self._store.memory_bytes)

    def begin_reply(self) -> None:
        """Set `notice` to a summary of the memory freed since the last reply."""
        self.notice = " · ".join(self._unreported)
        self._unreported = []

    def drop_prefixes(self) -> float:
        """Evict cached prefixes if memory is low, after writing them to disk if the disk cache is enabled.

        Returns:
            The time taken in seconds, or 0 if memory is not low.
        """
        if not (self._store and self._store.memory_bytes and self.is_low):
            return 0.0
        started = now()
        self._report("from the cache of earlier chats", self._store.reclaim())
        return now() - started

    def reclaim_idle(self) -> None:
        """Evict cached prefixes, and then shrink the context, if memory is low between replies."""
        self.drop_prefixes()
        if self._context.can_shrink and self.is_low:
            self._report("by shrinking the context", self._context.shrink())

    def check_during_reply(self) -> None:
        """Evict cached prefixes without writing them to disk, if memory is low during a reply.

        Call this after each draft has been verified. It checks the free memory at most once per second.
        """
        store, clock = self._store, now()
        if store is None or clock < self._next_check:
            return
        self._next_check = clock + CHECK_SECONDS
        if store.memory_bytes and self.is_low:
            self._report("from the cache of earlier chats", store.reclaim(write=False))
            self.notice = " · ".join(filter(None, (self.notice, *self._unreported)))
            self._unreported = []

    def _report(self, what: str, freed_bytes: int) -> None:
        if freed_bytes <= 0:
            return
        release_free_memory()
        self.last_reclaim = f"memory was low: freed {format_bytes(freed_bytes)} {what}"
        self.reclaimed_bytes += freed_bytes
        self._unreported.append(self.last_reclaim)
