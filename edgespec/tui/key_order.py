"""Pass keys on in the order in which they were typed, however fast the user types."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from textual import events
from textual.app import App
from textual.dom import DOMNode

__all__ = ["KeyOrder"]

# Maximum time in seconds that a key waits for the key before it, so that Esc works while a widget is busy.
_MAX_WAIT_SECONDS = 1.0


class KeyOrder:
    """Holds each key until the widgets have handled the key before it. Owned by the app.

    Used only in the event loop of the app.

    Textual sends a key to the widget that has the focus at that moment. A key that moves the focus or opens a
    dialog does so a little later. Without this class, the next keys of a fast typist reach the wrong widget.

    Args:
        app: The app.
        dispatch: Sends a key or pasted text to the focused widget.
    """

    def __init__(self, app: App[Any], dispatch: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app, self._dispatch = app, dispatch
        self._held: deque[events.Event] = deque()
        # Identifies the key that the widgets are handling. None if they are waiting for a key.
        self._handled_now: object | None = None

    async def add(self, event: events.Event) -> None:
        """Pass on a key or pasted text once the keys before it have been handled."""
        if self._handled_now is None:
            await self._pass_on(event)
        else:
            self._held.append(event)

    async def _pass_on(self, event: events.Event) -> None:
        key = self._handled_now = object()
        asyncio.get_running_loop().call_later(_MAX_WAIT_SECONDS, self._app.call_later, self._give_up, key)
        path = self._path
        await self._dispatch(event)
        # The widgets may handle a key by posting another message to themselves, so follow the path twice.
        await self._follow(key, deque(path + path), is_last=False)

    @property
    def _path(self) -> list[DOMNode]:
        """The nodes that a key passes: the focused widget, its ancestors, the screen and the app."""
        return (self._app.focused or self._app.screen).ancestors_with_self

    async def _follow(self, key: object, path: deque[DOMNode], *, is_last: bool) -> None:
        """Wait until each node of the path in turn has handled the messages in its queue."""
        while path:
            node = path.popleft()
            if node.call_later(self._follow, key, path, is_last=is_last):
                return
            if node is self._app:
                # The app is closing. No widget handles any more keys.
                self._held.clear()
        if is_last:
            await self._end(key)
        else:
            # The key may have opened a dialog, so wait until the dialog is ready too.
            await self._follow(key, deque(self._path), is_last=True)

    async def _end(self, key: object) -> None:
        """Pass on the next key, unless `key` is no longer the key that is being handled."""
        if key is self._handled_now:
            self._handled_now = None
            if self._held:
                await self._pass_on(self._held.popleft())

    async def _give_up(self, key: object) -> None:
        """Pass on all keys that wait for `key`, whose handling takes too long."""
        if key is not self._handled_now:
            return
        if self._held:
            await self._dispatch(self._held.popleft())
            # The widgets may have called `Widget.focus`, which moves the focus only once the app is idle.
            self._app.call_later(self._give_up, key)
        else:
            self._handled_now = None
