"""Turn taking with the model thread: one reply at a time, and what is to happen after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from edgespec.tui.widgets.messages import ReplyMessage
from edgespec.tui.worker import Ask, ChatOpened, ModelThread, TurnEnded

if TYPE_CHECKING:
    from edgespec import MethodReport, Stats
    from edgespec.chat.message import Message

__all__ = ["Turns"]


class Turns:
    """Sends what is asked to the model thread and brings back what it writes."""

    def __init__(
        self,
        thread: ModelThread,
        *,
        on_opened: Callable[[ChatOpened], Awaitable[None]],
        on_ended: Callable[[TurnEnded, ReplyMessage], Awaitable[None]],
    ) -> None:
        self._thread = thread
        self._on_opened = on_opened
        self._on_ended = on_ended
        self._opening = 0
        self._reply: ReplyMessage | None = None
        self._then: Callable[[], Awaitable[None]] | None = None

    @property
    def writing(self) -> bool:
        """True while a reply is being written."""
        return self._reply is not None

    @property
    def idle(self) -> bool:
        """True when nothing is under way in the model thread."""
        return self._reply is None and not self._opening

    @property
    def live_stats(self) -> Stats | None:
        """The stats of the reply being written."""
        return self._thread.live_stats if self.writing else None

    @property
    def live_method(self) -> MethodReport | None:
        """How the reply being written is sped up by now."""
        return self._thread.live_method if self.writing else None

    def open_chat(self, system: str | None, messages: tuple[Message, ...]) -> None:
        """Let the model thread open another conversation."""
        self._opening += 1
        self._thread.open_chat(system, messages)

    def begin(self, ask: Ask, reply: ReplyMessage) -> None:
        """Ask for a reply, which is written into `reply`."""
        self._reply = reply
        self._thread.ask(ask)

    def stop(self) -> None:
        """Stop the reply being written."""
        self._thread.cancel()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Do this now, or stop the reply being written and do it then."""
        if self.writing:
            self._then = action
            self.stop()
        else:
            await action()

    async def tick(self) -> None:
        """Bring over what the model thread has done since the last tick."""
        # Events first: every chunk of a reply is in its queue before the event of its end.
        events = self._thread.take_events()
        chunks = self._thread.take_chunks()
        if chunks and self._reply is not None:
            await self._reply.write(chunks)
        elif self._reply is not None:
            self._reply.show_reading(self._thread.read_fraction)
        for event in events:
            if isinstance(event, ChatOpened):
                self._opening -= 1
                await self._on_opened(event)
            elif isinstance(event, TurnEnded) and self._reply is not None:
                reply, self._reply = self._reply, None
                await self._on_ended(event, reply)
                if self._then is not None:
                    then, self._then = self._then, None
                    await then()

    async def finish(self, patience_seconds: float) -> None:
        """Stop the reply and wait until its end has been dealt with, but not for ever."""
        self._then = None
        self.stop()
        deadline = asyncio.get_running_loop().time() + patience_seconds
        while self.writing and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
