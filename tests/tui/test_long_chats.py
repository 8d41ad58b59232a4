"""Long chats and fast replies: old messages are shown page by page, and the screen keeps up."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.tui.widgets.details import StatusLine
from edgespec.tui.widgets.messages import MessageWidget, Panel, ReplyMessage
from tests.tui.driving import driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading


async def test_hundreds_of_messages_open_quickly_and_page_upwards(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    now = datetime.now(UTC)
    messages = tuple(Message("user" if n % 2 == 0 else "assistant", f"message {n}") for n in range(600))
    store.save(SavedChat(store.new_id(), MessageTree.linear(messages), now, now, title="long"))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        began = time.monotonic()
        await d.say("/load long")
        assert time.monotonic() - began < 30
        assert "message 599" in d.transcript()
        older = 600 - len(d.chat.transcript.query("UserMessage, ReplyMessage"))
        assert 550 < older < 599
        assert f"{older} older messages" in d.transcript()
        d.chat.transcript.scroll_home(animate=False)
        await d.pilot.pause(0.1)
        await d.press("ctrl+home")
        await until(d.pilot, lambda: f"{older} older messages" not in d.transcript(), "older messages")
        await d.say("more")
        assert d.chat.current_chat.entries[-2].content == "more"


async def test_paging_upwards_skips_no_message(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    now = datetime.now(UTC)
    messages = tuple(Message("user" if n % 2 == 0 else "assistant", f"message {n}.") for n in range(80))
    store.save(SavedChat(store.new_id(), MessageTree.linear(messages), now, now, title="long"))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/load long")
        transcript, seen = d.chat.transcript, set()
        for _ in range(60):
            view = transcript.scrollable_content_region
            shown = transcript.query("UserMessage, ReplyMessage").results(MessageWidget)
            seen |= {each.place for each in shown if each.region.overlaps(view)}
            if 0 in seen:
                break
            await d.press("pageup")
            await d.pilot.pause(0.1)
        assert seen == set(range(80))


@pytest.mark.long
async def test_a_fast_reply_is_drawn_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0
    write = ReplyMessage.write

    async def counted(reply: ReplyMessage, chunks: list[object]) -> None:
        nonlocal drawn
        drawn += 1
        await write(reply, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplyMessage, "write", counted)
    fast = Script(text="word " * 300, pause_seconds=0.004)
    async with driving(loading(ScriptedRuntime(scripts=[fast])), tmp_path) as d:
        began = time.monotonic()
        await d.say("go")
        seconds = time.monotonic() - began
        assert drawn <= 26 * seconds + 2
        assert d.chat.current_chat.entries[-1].content.count("word") == 300


async def test_the_screen_keeps_up_and_stays_at_the_end(tmp_path: Path) -> None:
    lines = Script(text="a line of text\n\n" * 60, pause_seconds=0.002)
    async with driving(loading(ScriptedRuntime(scripts=[lines])), tmp_path) as d:
        await d.say("go")
        assert d.chat.transcript.scroll_y == d.chat.transcript.max_scroll_y
        await d.press("pageup")
        await d.pilot.pause(0.1)
        assert d.chat.transcript.scroll_y < d.chat.transcript.max_scroll_y
        await d.press("ctrl+end")
        await asyncio.sleep(0.1)
        assert d.chat.transcript.scroll_y == d.chat.transcript.max_scroll_y


@pytest.mark.long
async def test_dropped_messages_are_counted_in_the_status(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(text="Two.", dropped=1)])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        assert "the model no longer sees the 1 message above" in d.transcript()
        assert d.chat.query_one(StatusLine).facts.dropped_messages == 1
        assert not d.chat.query(Panel)
