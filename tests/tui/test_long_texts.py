"""Very long messages: the chat shows their start, says so, and keeps the whole text."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec import TextChunk
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.tui.app import ChatApp
from edgespec.tui.widgets import long_texts
from edgespec.tui.widgets.long_texts import drawing_seconds, limited_chunks, limited_markdown, limited_text
from edgespec.tui.widgets.messages import ReplyMessage
from tests.tui.driving import driving
from tests.tui.scripted import Script, ScriptedRuntime, loading

NOON = datetime(2025, 3, 1, 12, tzinfo=UTC)
COPY = "type /copy to copy the last reply, or /copy chat to copy the whole chat)"


def save(folder: Path, *messages: Message) -> None:
    ChatStore(folder / "chats").save(SavedChat("one", MessageTree.linear(messages), NOON, NOON))


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "most_characters"),
    [
        ("word ", 334_000),
        ("A paragraph.\n\n", 138_000),
        ("- item\n", 87_000),
        ("|a|b|\n", 24_000),
        ("|", 16_000),
        ("\n", 334_000),
    ],
)
def test_time_for_drawing_is_limited(part: str, most_characters: int) -> None:
    markdown = part * 400_000
    shown = limited_markdown(markdown)
    assert 0.9 * most_characters < len(shown) < most_characters
    assert shown == markdown[: len(shown)]
    assert drawing_seconds(markdown) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("markdown", ["", "word", "- item\n", "```\ncode\n"])
def test_short_replies_are_drawn_whole(markdown: str) -> None:
    assert limited_markdown(markdown) == markdown
    assert drawing_seconds(markdown) < 0.1


def test_plain_texts_and_chunks_are_limited() -> None:
    assert limited_text("a" * 100_000) == "a" * 100_000
    assert limited_text("a" * 100_001).endswith("a…\n(1 more character is not shown)")
    chunks = [TextChunk("word " * 1000, 1, True)] * 30
    assert limited_chunks(chunks) == chunks[:20]
    assert limited_chunks(chunks[:3]) == chunks[:3]


@pytest.mark.long
async def test_a_saved_reply_of_megabytes_is_shown_in_part_and_copied_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    async def copy(_app: ChatApp, text: str, name: str) -> str:
        copied.append(text)
        return f"Copied the {name}."

    monkeypatch.setattr("edgespec.tui.screen_commands.copy_text", copy)
    text = "word " * 600_000 + "end"
    save(tmp_path, Message("user", "Write."), Message("assistant", text))
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as driver:
        await driver.said(f"more characters are not shown; {COPY}")
        assert len(driver.transcript()) < 400_000
        await driver.say("/copy")
        assert copied == [text]
        await driver.say("And now?")
        (path,) = driver.saved()
    assert json.loads(path.read_text("utf-8"))["messages"][1]["content"] == text


@pytest.mark.long
async def test_a_growing_reply_is_drawn_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "_MAX_SECONDS", 0.004)
    text = "- an item\n" * 300
    async with driving(loading(ScriptedRuntime([Script(text)])), tmp_path) as driver:
        await driver.say("Write a list.")
        assert 0 < driver.transcript().count("an item") < 60
        assert driver.chat.current_chat.entries[-1].content == text
        await driver.said(f"more characters are not shown; {COPY}")
        await driver.press("f4")
        await driver.said("guessed correctly")
        assert f"more characters are not shown; {COPY}" in driver.transcript()
        assert driver.transcript().count("an item") < 60


@pytest.mark.long
async def test_long_reasoning_is_shown_in_part(tmp_path: Path) -> None:
    thought = Message("assistant", "Yes.", "word " * 100_000, ("<think>", "</think>"))
    save(tmp_path, Message("user", "Think."), thought)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as driver:
        await driver.said("Yes.")
        await driver.press("f7")
        await driver.said("(400,000 more characters are not shown; the chat file contains the whole text)")


async def test_messages_that_take_long_to_draw_wait_for_a_click(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.tui.widgets.message_pages._PAGE_SECONDS", 0.002)
    items = Message("assistant", "- an item\n" * 20)
    save(tmp_path, *[Message("user", "Write."), items] * 4)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as driver:
        await driver.said("older messages: click")
        assert len(driver.chat.transcript.query(ReplyMessage)) == 1
        await driver.press("ctrl+home", "ctrl+home")
        assert len(driver.chat.transcript.query(ReplyMessage)) == 2
