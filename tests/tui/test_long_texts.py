"""Long messages, which are shown in part, long pasted texts, which the input folds, and long chats.

The old messages of a long chat are shown page by page, and the screen keeps up with fast replies.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from textual import events

from edgespec import TextChunk
from edgespec.chat.message import Message
from edgespec.tui.app import ChatApp
from edgespec.tui.widgets import long_texts
from edgespec.tui.widgets.long_texts import drawing_seconds, limited_chunks, limited_markdown, limited_text
from edgespec.tui.widgets.messages import MessageWidget, ReplyMessage
from tests.tui.driving import Driver, driving, save_chat, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

COPY = "type /copy to copy the last reply, or /copy chat to copy the whole chat)"
LINES = "\n".join(f"line {number} of the text" for number in range(30))
LABEL = "[Pasted text 1: 30 lines, 150 tokens]"


def talk(number: int) -> list[Message]:
    """Return this many messages, those of the user and those of the model in turn."""
    return [Message("user" if n % 2 == 0 else "assistant", f"message {n}.") for n in range(number)]


async def paste(d: Driver, text: str) -> None:
    before = d.chat.prompt.text
    d.app.post_message(events.Paste(text))
    await until(d.pilot, lambda: d.chat.prompt.text != before, "the pasted text")


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
    save_chat(tmp_path, Message("user", "Write."), Message("assistant", text))
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
    save_chat(tmp_path, Message("user", "Think."), thought)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as driver:
        await driver.said("Yes.")
        await driver.press("f7")
        await driver.said("(400,000 more characters are not shown; the chat file contains the whole text)")


async def test_messages_that_take_long_to_draw_wait_for_a_click(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.tui.widgets.transcript._PAGE_SECONDS", 0.002)
    items = Message("assistant", "- an item\n" * 20)
    save_chat(tmp_path, *[Message("user", "Write."), items] * 4)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as driver:
        await driver.said("older messages: click")
        assert len(driver.chat.transcript.query(ReplyMessage)) == 1
        await driver.press("ctrl+home", "ctrl+home")
        assert len(driver.chat.transcript.query(ReplyMessage)) == 2


@pytest.mark.long
async def test_a_long_paste_is_one_line_and_is_sent_whole(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await d.write("Summarise")
        await d.press("space")
        await paste(d, LINES.replace("\n", "\r"))
        await d.write(" now")
        assert d.chat.prompt.text == f"Summarise {LABEL} now"
        assert LABEL in "\n".join(d.screen_text())
        await d.press("enter")
        await d.settled()
        assert runtime.asked[0][1] == f"Summarise {LINES} now"
        assert d.chat.current_chat.entries[0].content == f"Summarise {LINES} now"
        await d.press("up")
        assert d.chat.prompt.text == f"Summarise {LABEL} now", "the history shows it folded too"
        await d.press("enter")
        await d.settled()
        assert runtime.asked[1][1] == f"Summarise {LINES} now"


async def test_a_long_line_is_folded_and_a_short_text_is_not(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await paste(d, "a\nb\nc")
        assert d.chat.prompt.text == "a\nb\nc"
        d.chat.prompt.clear()
        await paste(d, "word " * 300)
        assert d.chat.prompt.text == "[Pasted text 1: 1 line, 300 tokens]"
        assert d.chat.prompt.whole_text == "word " * 300


@pytest.mark.long
async def test_a_label_is_deleted_as_a_whole_and_undo_restores_it(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await d.write("a")
        await paste(d, LINES)
        await d.press("backspace")
        assert d.chat.prompt.text == "a"
        await d.press("ctrl+underscore")
        assert d.chat.prompt.text == f"a{LABEL}"
        await d.press("left", "left", "x")
        assert d.chat.prompt.text == f"a{LABEL}x", "typing within a label keeps it whole"
        await d.press("home", "right", "right", "delete")
        assert d.chat.prompt.text == "ax"
        await d.press("ctrl+underscore", "enter")
        await d.settled()
        assert runtime.asked[0][1] == f"a{LINES}x"


@pytest.mark.long
async def test_two_pasted_texts_have_two_labels(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await paste(d, LINES)
        await paste(d, LINES.upper())
        await d.press("enter")
        await d.settled()
        assert runtime.asked[0][1] == LINES + LINES.upper()


async def test_the_editor_shows_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor.py"
    editor.write_text(
        "import sys\nfrom pathlib import Path\n"
        "file = Path(sys.argv[1])\nfile.write_text(file.read_text().replace('line 7', 'LINE 7'))\n"
    )
    monkeypatch.setenv("VISUAL", f"{sys.executable} {editor}")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        monkeypatch.setattr(type(d.app), "suspend", lambda _: nullcontext())
        await paste(d, LINES)
        await d.press("ctrl+g")
        assert d.chat.prompt.whole_text == LINES.replace("line 7", "LINE 7")


async def test_deleting_to_the_end_of_an_empty_or_last_line_does_nothing(tmp_path: Path) -> None:
    keys = ("ctrl+k", "ctrl+u", "ctrl+w", "delete", "backspace", "ctrl+delete", "ctrl+x")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        for key in keys:
            await d.press(key)
            assert d.chat.prompt.text == ""
        await d.write("one")
        await d.press("ctrl+k", "delete")
        assert d.chat.prompt.text == "one"
        await d.press("ctrl+j", "ctrl+k", "up", "end", "ctrl+k")
        assert d.chat.prompt.text == "one"
        assert d.app.is_running


async def test_hundreds_of_messages_open_quickly_and_page_upwards(tmp_path: Path) -> None:
    save_chat(tmp_path, *talk(600), title="long")
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
    save_chat(tmp_path, *talk(80), title="long")
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
