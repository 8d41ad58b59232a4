"""Communication with the model thread: one reply at a time, and an action to run after it."""

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
    """Sends requests to the model thread and shows the text that it returns."""

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
        """Stats of the running reply, or None."""
        return self._thread.live_stats if self.writing else None

    @property
    def live_method(self) -> MethodReport | None:
        """Method of the running reply, or None."""
        return self._thread.live_method if self.writing else None

    def open_chat(self, system: str | None, messages: tuple[Message, ...]) -> None:
        """Open another conversation in the model thread."""
        self._opening += 1
        self._thread.open_chat(system, messages)

    def begin(self, ask: Ask, reply: ReplyMessage) -> None:
        """Start a reply, which is shown in the widget `reply`."""
        self._reply = reply
        self._thread.ask(ask)

    def stop(self) -> None:
        """Stop the running reply."""
        self._thread.cancel()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or after stopping the running reply."""
        if self.writing:
            self._after_reply = action
            self.stop()
        else:
            await action()

    async def tick(self) -> None:
        """Show what the model thread has done since the last tick."""
        # Events are taken before chunks. All chunks of a reply are queued before the event of its end, so
        # none of them can be missed.
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
