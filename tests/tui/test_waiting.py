"""Messages sent during a reply wait, can be taken back, and are sent when the reply ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading


def runtime_with_gate(*more: Script) -> tuple[ScriptedRuntime, threading.Event]:
    """Return a runtime whose first reply waits for the event."""
    gate = threading.Event()
    return ScriptedRuntime(scripts=[Script("The first reply.", gate=gate), *more]), gate


def sent(d: Driver) -> list[str]:
    return [entry.content for entry in d.chat.current_chat.entries if entry.role == "user"]


def shown(d: Driver) -> str:
    return "\n".join(d.screen_text())


async def test_messages_wait_for_the_reply_and_are_sent_in_order(tmp_path: Path) -> None:
    runtime, gate = runtime_with_gate(Script("The second reply."), Script("The third reply."))
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("one")
        await d.send("two\nhas two lines")
        await d.send("three")
        await d.sees("Waiting  two has two lines")
        await d.sees("Waiting  three")
        assert d.chat.prompt.text == ""
        assert len(runtime.asked) <= 1
        gate.set()
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 6, "three replies")
        await d.settled()
        assert sent(d) == ["one", "two\nhas two lines", "three"]
        assert "Waiting" not in shown(d)


async def test_up_takes_back_the_newest_message(tmp_path: Path) -> None:
    runtime, gate = runtime_with_gate()
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("one")
        await d.send("two")
        await d.send("three")
        await d.press("up")
        assert d.chat.prompt.text == "three"
        assert d.chat.waiting.texts == ["two"]
        await d.write("!")
        await d.press("up")
        assert d.chat.waiting.texts == ["two"], "a message in the input is not lost"
        d.chat.prompt.clear()
        await d.press("up")
        assert d.chat.prompt.text == "two"
        gate.set()
        await d.settled()
        assert sent(d) == ["one"]
        assert d.chat.prompt.text == "two"


@pytest.mark.long
async def test_escape_stops_the_reply_and_the_next_message_is_sent(tmp_path: Path) -> None:
    long = Script(LONG_TEXT, pause_seconds=0.02)
    async with driving(loading(ScriptedRuntime(scripts=[long])), tmp_path) as d:
        await d.send("one")
        await d.said("word word")
        await d.send("two")
        await d.press("escape")
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 4, "the second reply")
        await d.settled()
        assert sent(d) == ["one", "two"]


async def test_a_reply_that_is_stopped_before_its_first_word_returns_all_messages(tmp_path: Path) -> None:
    runtime, _gate = runtime_with_gate()
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("one")
        await d.send("two")
        await until(d.pilot, lambda: bool(runtime.asked), "the reply")
        await d.press("escape")
        await d.settled()
        assert d.chat.prompt.text == "one\n\ntwo"
        assert sent(d) == []


async def test_an_error_stays_on_the_screen_until_the_next_message_is_sent(tmp_path: Path) -> None:
    gate = threading.Event()
    fails = Script("One two three", gate=gate, error=RuntimeError("boom"), error_after=2)
    runtime = ScriptedRuntime(scripts=[fails, Script("The second reply.")])
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("one")
        await d.send("two")
        gate.set()
        await d.said("boom")
        await d.settled()
        await d.sees("Enter sends the waiting message")
        assert (sent(d), d.chat.waiting.texts) == (["one"], ["two"])
        assert "boom" in d.transcript()
        await d.press("enter")
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 4, "the second reply")
        await d.settled()
        assert sent(d) == ["one", "two"]
        assert "boom" not in d.transcript()


async def test_another_chat_returns_the_messages_to_the_input(tmp_path: Path) -> None:
    long = Script(LONG_TEXT, pause_seconds=0.02)
    async with driving(loading(ScriptedRuntime(scripts=[long])), tmp_path) as d:
        await d.send("one")
        await d.said("word word")
        await d.send("two")
        await d.press("ctrl+n")
        await until(d.pilot, lambda: d.chat.prompt.text == "two", "the message")
        await d.settled()
        assert sent(d) == []


async def test_another_model_answers_the_messages_that_wait(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(LONG_TEXT, pause_seconds=0.02)])
    other = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path, load_other=lambda _: loading(other)) as d:
        await d.send("one")
        await d.said("word word")
        await d.send("two")
        d.chat.post_message(d.chat.ModelChosen("other"))
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 4, "the second reply")
        await d.settled()
        assert [asked[1] for asked in (*runtime.asked, *other.asked)] == ["one", "two"]
        assert len(other.asked) == 1


async def test_the_next_message_is_sent_if_the_files_of_one_cannot_be_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    runtime, gate = runtime_with_gate(Script("The second reply."))
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("one")
        await d.send("@pipe explain")
        await d.send("next")
        await d.write("dra")
        gate.set()
        await until(d.pilot, lambda: sent(d) == ["one", "next"], "the next message")
        assert d.chat.prompt.text == "dra"
