"""A driver for tests of the chat. It types, waits until the app is idle, and compares the screen."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from textual import events
from textual.content import Content
from textual.pilot import Pilot
from textual.selection import SELECT_ALL
from textual.widgets import Static

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat, Setting
from edgespec.chat.store import ChatStore
from edgespec.tui.app import ChatApp
from edgespec.tui.chat_screen import ChatScreen
from edgespec.tui.widgets.reply_markdown import ReplyMarkdown
from edgespec.tui.worker import Load

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
# A question for the demo model, and settings with which its reply is always the same.
ASK = "How do I list files by size?"
STEADY: Mapping[str, Setting] = {
    "seed": 1,
    "temperature": 0.0,
    "method": "model+suffix",
    "max_tokens": 40,
}
NAMES = {" ": "space", "?": "question_mark", "/": "slash", ".": "full_stop", "-": "minus", "_": "underscore"}

# The ends of a scrollbar's handle, whose positions depend on when the screen was last painted.
_SCROLLBAR = "▁▂▃▄▅▆▇"


async def until(
    pilot: Pilot[None], condition: Callable[[], bool], what: str = "", seconds: float = 60
) -> None:
    """Wait for `condition`, and then for the messages that are queued at that time."""
    for attempt in range(int(seconds / 0.02)):
        if condition():
            if attempt:
                await pilot.pause(0)
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what or condition}")


def chat_screen(app: ChatApp) -> ChatScreen:
    """The chat, which may lie under a dialog."""
    return next(screen for screen in app.screen_stack if isinstance(screen, ChatScreen))


class Driver:
    """The app under test, with functions to use it."""

    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def chat(self) -> ChatScreen:
        return chat_screen(self.app)

    async def settled(self) -> None:
        """Wait until the chat is open and the model thread is idle."""
        await until(
            self.pilot,
            lambda: any(isinstance(screen, ChatScreen) for screen in self.app.screen_stack),
            "the chat",
        )
        await until(self.pilot, lambda: self.chat.idle, "the end of the reply")
        await self.pilot.pause(0.05)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def write(self, text: str) -> None:
        """Type a text."""
        await self.pilot.press(*(NAMES.get(letter, letter) for letter in text))

    async def write_fast(self, *keys: str, wait: bool = True) -> None:
        """Type keys without pausing, so that all are queued before the app handles the first one."""
        for key in keys:
            self.app.post_message(events.Key(NAMES.get(key, key), key if len(key) == 1 else None))
        if wait:
            await self.pilot.pause(0.1)

    async def send(self, text: str) -> None:
        """Put a text into the input and press Enter, without waiting for the reply."""
        self.chat.prompt.replace_text(text)
        await self.pilot.press("enter")

    async def say(self, text: str) -> None:
        """Send a text and wait for the end of the reply."""
        await self.send(text)
        await self.settled()

    def transcript(self) -> str:
        """All text of the transcript."""
        parts: list[str] = []
        for widget in self.chat.transcript.query("Static, Pairs, ReplyMarkdown"):
            if not all(node.display for node in widget.ancestors_with_self if hasattr(node, "display")):
                continue
            if isinstance(widget, ReplyMarkdown):
                selected = widget.get_selection(SELECT_ALL)
                parts += selected[:1] if selected else []
                continue
            visual = widget.visual if isinstance(widget, Static) else widget.render()
            if isinstance(visual, Content):
                parts.append(visual.plain)
        return "\n".join(parts)

    def screen_text(self) -> list[str]:
        """The lines on screen."""
        strips = self.app.screen._compositor.render_strips()
        rows = (strip.text.replace("\N{NO-BREAK SPACE}", " ").rstrip() for strip in strips)
        return [row.rstrip(_SCROLLBAR).rstrip() for row in rows]

    async def sees(self, text: str) -> None:
        """Wait until `text` is on the screen."""
        await until(self.pilot, lambda: text in "\n".join(self.screen_text()), repr(text))

    async def said(self, text: str) -> None:
        """Wait until `text` is in the transcript."""
        await until(self.pilot, lambda: text in self.transcript(), repr(text))

    def saved(self) -> list[Path]:
        """The chat files."""
        return sorted(self.app.store.folder.glob("*.json"))


@asynccontextmanager
async def driving(
    load: Load,
    folder: Path,
    *,
    size: tuple[int, int] = (80, 24),
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[Driver]:
    """Run the app without a terminal. `options` are additional arguments of `ChatApp`."""
    app = ChatApp(load, models=ModelReferences("demo"), store=ChatStore(folder / "chats"), **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        driver = Driver(app, pilot)
        if wait:
            await driver.settled()
        yield driver
    app.model_thread.close()
    assert app.model_thread.join(60)


def save_chat(folder: Path, *messages: Message, chat_id: str = "one", **options: Any) -> ChatStore:
    """Save a chat with these messages, and return the store. `options` are further fields of `SavedChat`."""
    store = ChatStore(folder / "chats")
    store.save(SavedChat(chat_id, MessageTree.linear(messages), NOON, NOON, **options))
    return store


KEPT = Path(__file__).parent / "snapshots"


async def check_screen(d: Driver, name: str) -> None:
    """Compare the screen with `snapshots/NAME-WIDTHxHEIGHT.txt`. The colours must not change its text."""
    columns, rows = d.app.size
    text = await _text(d)
    assert all(len(line) <= columns for line in text.splitlines())
    path = KEPT / f"{name}-{columns}x{rows}.txt"
    if os.environ.get("EDGESPEC_UPDATE_SNAPSHOTS"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")
    dark = _save_picture(d, path.stem)
    d.chat.preferences.theme = "light"
    d.chat.post_message(d.chat.PreferencesChanged())
    assert await _text(d) == text
    assert _save_picture(d, f"{path.stem}-light") != dark


async def _text(d: Driver) -> str:
    await d.pilot.pause(0.3)
    lines = (re.sub(f"[{_SCROLLBAR}]", " ", line).rstrip() for line in d.screen_text())
    return "\n".join(lines) + "\n"


def _save_picture(d: Driver, name: str) -> str:
    """Return a picture of the screen. Also save it if EDGESPEC_PICTURES names a folder."""
    picture = d.app.export_screenshot()
    if folder := os.environ.get("EDGESPEC_PICTURES"):
        Path(folder, f"{name}.svg").write_text(picture, "utf-8")
    return picture
