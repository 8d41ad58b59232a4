"""The chat with the real demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edgespec.chat.saved_chat import Setting
from edgespec.chat.store import ChatStore
from edgespec.tui.widgets.details import StatusLine
from edgespec.tui.widgets.messages import ReplyMessage, UserMessage
from edgespec.tui.worker import Load
from tests.tui.driving import ASK, STEADY, driving, until


async def test_a_question_gets_a_streamed_markdown_reply(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        welcome = d.transcript()
        assert "speed-up: draft model demo-draft" in welcome
        assert "Press F9 to choose and download a real model" in " ".join(welcome.split())
        assert "A small draft model guesses the next words" in welcome
        await d.say(ASK)
        reply = d.chat.transcript.query_one(ReplyMessage)
        assert reply.text == d.chat.current_chat.entries[-1].content
        assert "\n```" in reply.text
        assert "```" not in d.transcript()
        facts = d.chat.query_one(StatusLine).facts
        assert facts.speed_up
        assert facts.speed_up != "speed-up off"
        assert facts.tokens_per_second is not None
        assert facts.tokens_per_second > 1
        assert facts.acceptance_rate is not None
        assert 0 < facts.context_used_tokens < facts.context_tokens
        assert facts.memory_bytes > 10_000_000


def words(text: str) -> str:
    """Return the words of a text, without the marks of Markdown."""
    return " ".join(re.findall(r"\w+", text))


@pytest.mark.long
async def test_a_coloured_reply_that_was_continued_in_another_run_is_shown_whole(
    demo: Load, tmp_path: Path
) -> None:
    settings: dict[str, Setting] = {"max_tokens": 6, "temperature": 0.0}
    async with driving(demo, tmp_path, settings=settings) as d:
        await d.say("How do I list files?")
        start = d.chat.current_chat.entries[-1].content
    async with driving(demo, tmp_path, settings=settings, resume="last") as d:
        await d.press("f4")
        await d.say("/continue")
        whole = d.chat.current_chat.entries[-1].content
        assert whole.startswith(start)
        assert len(whole) > len(start)
        assert words(whole) in words(d.transcript())


@pytest.mark.long
async def test_each_turn_is_saved_and_can_be_continued_in_another_run(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY, system="Be brief.") as d:
        await d.say(ASK)
        (path,) = d.saved()
        first = json.loads(path.read_text())
        assert first["title"] == ASK
        assert [m["role"] for m in first["messages"]] == ["user", "assistant"]
        await d.say("And by date?")
        assert len(json.loads(path.read_text())["messages"]) == 4
    async with driving(demo, tmp_path) as d:
        await d.press("f2")
        await d.sees(ASK)
        await d.press("enter")
        await d.settled()
        chat = d.chat.current_chat
        assert len(chat.entries) == 4
        assert chat.system == "Be brief."
        assert chat.settings == STEADY
        assert d.chat.query_one(StatusLine).facts.context_used_tokens > 20
        await d.say("And by name?")
        assert d.saved() == [path]
        assert len(json.loads(path.read_text())["messages"]) == 6


@pytest.mark.long
async def test_the_same_seed_regenerates_the_same_reply(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings={"seed": 7, "temperature": 0.8}) as d:
        await d.say(ASK)
        first = d.chat.current_chat.entries[-1].content
        await d.press("ctrl+r")
        await d.settled()
        assert [entry.content for entry in d.chat.current_chat.entries] == [ASK, first]
        assert len(d.chat.transcript.query(ReplyMessage)) == 1
        await d.say("/set seed 8")
        await d.say("/regen")
        assert d.chat.current_chat.entries[-1].content != first


async def test_the_last_message_can_be_edited(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say("What does tar do?")
        await d.say("hello")
        d.chat.prompt.replace_text("half a thought")
        await d.press("ctrl+p")
        assert d.chat.prompt.text == "hello"
        await d.press("escape")
        assert d.chat.prompt.text == "half a thought"
        await d.press("ctrl+p")
        await d.say(ASK)
        assert [entry.content for entry in d.chat.current_chat.entries if entry.role == "user"] == [
            "What does tar do?",
            ASK,
        ]
        assert len(d.chat.transcript.query(UserMessage)) == 2
        assert d.chat.prompt.text == ""


async def test_tokens_are_coloured_by_origin(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say(ASK)
        before = d.chat.current_chat.entries[-1]
        assert "".join(chunk.text for chunk in before.chunks) == before.content
        await d.press("f4")
        reply = d.chat.transcript.query_one(ReplyMessage)
        drafted = sum(p.token_count for p in before.chunks if p.accepted)
        shown = [reply.coloured]
        assert f"{drafted} guessed correctly" in d.transcript()
        await d.press("f4")
        shown.append(reply.coloured)
        assert shown == [True, False]
        assert "guessed correctly" not in d.transcript()


async def test_new_and_clear_leave_the_old_chat_in_the_list(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say(ASK)
        await d.say("/system Be brief.")
        await d.press("ctrl+l")
        await d.settled()
        assert d.chat.current_chat.entries == []
        systems = [d.chat.current_chat.system]
        await d.say("What does tar do?")
        await d.press("ctrl+n")
        await d.settled()
        systems.append(d.chat.current_chat.system)
        assert systems == ["Be brief.", None]
        assert d.chat.current_chat.settings == STEADY
        assert len(d.saved()) == 2


async def test_copy(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.press("ctrl+y")
        assert d.app.clipboard == ""
        await d.say(ASK)
        reply = d.chat.current_chat.entries[-1].content
        await d.press("ctrl+y")
        await until(d.pilot, lambda: d.app.clipboard == reply.strip())
        await d.press("ctrl+o")
        await until(d.pilot, lambda: d.app.clipboard != reply.strip())
        assert f"```sh\n{d.app.clipboard}\n```" in reply
        await d.say("/copy chat")
        assert d.app.clipboard.startswith(f"**You:**\n\n{ASK}\n\n**Model:**")


@pytest.mark.long
async def test_long_chat_drops_old_messages_and_shows_it(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings={**STEADY, "max_tokens": 20}) as d:
        words = "copy move delete list find sort " * 24
        for turn in range(5):
            await d.say(f"{turn}: explain this list of words: {words}")
        assert len(d.chat.current_chat.entries) == 10
        assert "the model no longer sees the 6 messages above" in d.transcript()
        assert d.chat.query_one(StatusLine).facts.dropped_messages == 6
        column = list(d.chat.transcript.query_one("#messages").children)
        line = next(place for place, widget in enumerate(column) if widget.has_class("unseen"))
        assert len([w for w in column[:line] if isinstance(w, UserMessage | ReplyMessage)]) == 6


async def test_list_of_chats_opens_deletes_and_explains_broken_files(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say(ASK)
        (good,) = d.saved()
        broken = good.with_name("broken.json")
        broken.write_text('{"version": 1, "id": "brok')
        await d.press("f2")
        await d.sees("unreadable")
        d.chat.sidebar.highlight("broken")
        await d.press("enter")
        await d.said("not valid JSON")
        assert broken.exists()
        assert len(d.chat.current_chat.entries) == 2
        d.chat.sidebar.highlight(good.stem)
        d.chat.sidebar.focus()
        await d.press("delete")
        await d.sees("Deleted “")
        await until(d.pilot, lambda: not good.exists() and not d.chat.current_chat.entries)
        d.chat.prompt.focus()
        await d.say("/undo")
        assert good.exists()
        assert len(d.chat.current_chat.entries) == 2
        d.chat.sidebar.highlight(good.stem)
        d.chat.sidebar.focus()
        await d.press("delete")
        await until(d.pilot, lambda: not good.exists())
        d.app.archive.finish_all_deletions()
        assert sorted(path.name for path in good.parent.glob("*")) == [".lock", "broken.json"]


async def test_save_and_load_by_title(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say("/save nothing yet")
        assert d.saved() == []
        await d.say(ASK)
        await d.say('/save "Disk tricks"')
        assert ChatStore(tmp_path / "chats").list()[0].title == "Disk tricks"
        await d.say("/new")
        await d.say("/load disk")
        assert d.chat.current_chat.title == "Disk tricks"
        assert len(d.chat.current_chat.entries) == 2
        await d.say("/load no such thing")
        assert "No saved chat has 'no such thing' in its title" in d.transcript()
        assert "To change the model, type /model" in d.transcript()


async def test_unknown_command_suggests_the_nearest_name(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as d:
        await d.say("/regne")
        assert "Did you mean /regen?" in d.transcript()
        assert d.chat.prompt.text == "/regne"
        assert d.chat.current_chat.entries == []
        await d.write("hi")
        assert d.chat.prompt.text == "hi"
        await d.say("/regne")
        await d.press("ctrl+c", "ctrl+c")
        assert d.chat.prompt.text == ""
        await d.say("/etc/hosts")
        assert d.chat.current_chat.entries[0].content == "/etc/hosts"
