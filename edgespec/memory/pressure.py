"""Memory that other programs need is given back to them: what costs least first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter as now

from edgespec.files import format_bytes
from edgespec.heap import release_free_memory
from edgespec.memory.budget import available_bytes
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache import RESERVE_BYTES, SegmentStore

__all__ = ["MemoryPressure"]

# A look takes a third of a millisecond: within a reply there is one in so much time at most.
_LOOK_SECONDS = 1.0
# Guesses cost time when they are gone: the draft's cache goes only where less than this is free, and others
# took as much since the load. What was planned here is no reason.
_SEVERE_BYTES = RESERVE_BYTES // 4


class MemoryPressure:
    """Gives back while less than a reserve is free: to other programs, whatever was allowed.

    Between replies first what no text needs of the contexts, then copies of other texts, which go to disk
    where that was wanted, and where hardly anything is free the draft's cache. Within a reply copies only.

    available: the bytes that are free now. notice: what was given back between the last two replies, in
    words, and in the running one. said: what was at last; given_bytes: all together.
    """

    def __init__(
        self,
        context: ResizableContext,
        copies: SegmentStore | None = None,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self.notice = self.said = ""
        self.given_bytes = 0
        self.available = available
        self._context = context
        self._copies = copies
        self._next_look = 0.0
        # What was free after the load, and what the caches took then.
        self._free_at_first, self._cache_at_first = available(), context.kv_bytes
        self._news: list[str] = []

    @property
    def short(self) -> bool:
        """Whether other programs need memory now."""
        return self.available() < RESERVE_BYTES

    @property
    def anything(self) -> bool:
        """Whether there is anything left to give."""
        return self._context.gives or bool(self._copies and self._copies.held_bytes)

    def begin_reply(self) -> None:
        """A reply begins: it tells what was given back since the last one."""
        self.notice = " · ".join(self._news)
        self._news = []

    def between_replies(self, tokens: int = 0) -> float:
        """Give back what is needed elsewhere. tokens: so many are going to be in the context.

        No round is open. Belongs to the model's thread, as the next does. Returns the seconds that took, but
        for the look.
        """
        short, started = self.short, now()
        if not short and not self._context.suspended:
            return 0.0
        given: list[tuple[str, int]] = []
        if short and (freed := _returned(self._context.shrink(tokens))):
            given.append((f"{format_bytes(freed)} of the context that no text needs", freed))
            short = self.short
        if short and self._copies and (freed := _returned(self._copies.give_way())):
            given.append((f"{format_bytes(freed)} of kept texts", freed))
            short = self.short
        if not short:
            self._context.resume_draft()
        elif self._is_severe() and (freed := _returned(self._context.suspend_draft())):
            given.append(
                (f"the draft's {format_bytes(freed)}: it guesses no more until there is room", freed)
            )
        if given:
            self._news.append(self._given(given))
        return now() - started

    def _is_severe(self) -> bool:
        free = self.available()
        grown = self._context.kv_bytes - self._cache_at_first
        return free < _SEVERE_BYTES <= self._free_at_first - grown - free

    def within_reply(self) -> None:
        """Between two rounds: look now and then, and drop copies; nothing that is in use is touched."""
        copies, clock = self._copies, now()
        if copies is None or clock < self._next_look:
            return
        self._next_look = clock + _LOOK_SECONDS
        if copies.held_bytes and self.short and (freed := _returned(copies.give_way(write=False))):
            said = self._given([(f"{format_bytes(freed)} of kept texts", freed)])
            self.notice = " · ".join(filter(None, (self.notice, said)))

    def _given(self, given: Sequence[tuple[str, int]]) -> str:
        self.said = f"little memory was free: gave back {', '.join(what for what, _ in given)}"
        self.given_bytes += sum(freed for _, freed in given)
        return self.said


def _returned(freed_bytes: int) -> int:
    """So many bytes, which the system has now."""
    if freed_bytes:
        release_free_memory()
    return freed_bytes
