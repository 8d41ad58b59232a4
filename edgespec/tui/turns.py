"""Requests replies from the model thread, one at a time, and runs actions that wait for their end."""

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
    """Requests replies from the model thread and shows their text as it arrives."""

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
        self._after_reply: Callable[[], Awaitable[None]] | None = None

    @property
    def writing(self) -> bool:
        """True while a reply is being generated."""
        return self._reply is not None

    @property
    def idle(self) -> bool:
        """True if the model thread has nothing to do."""
        return self._reply is None and not self._opening

    @property
    def live_stats(self) -> Stats | None:
        """Stats of the running reply, or None if there is none."""
        return self._thread.live_stats if self.writing else None

    @property
    def live_method(self) -> MethodReport | None:
        """Drafting method of the running reply, or None if there is none."""
        return self._thread.live_method if self.writing else None

    def open_chat(self, system: str | None, messages: tuple[Message, ...]) -> None:
        """Open another conversation in the model thread."""
        self._opening += 1
        self._thread.open_chat(system, messages)

    def begin(self, ask: Ask, reply: ReplyMessage) -> None:
        """Start generating a reply and show it in the widget `reply`."""
        self._reply = reply
        self._thread.ask(ask)

    def stop(self) -> None:
        """Stop the running reply."""
        self._thread.cancel()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or once the running reply has been stopped."""
        if self.writing:
            self._after_reply = action
            self.stop()
        else:
            await action()

    async def tick(self) -> None:
        """Handle the events and show the text that the model thread has produced since the last tick."""
        # Read events before chunks. A reply queues all its chunks before its end event, so every chunk is
        # already in the queue when that event is handled.
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
                if self._after_reply is not None:
                    action, self._after_reply = self._after_reply, None
                    await action()

    async def finish(self, timeout_seconds: float) -> None:
        """Stop the reply and wait until its end has been handled, or until the timeout."""
        self._after_reply = None
        self.stop()
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while self.writing and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
