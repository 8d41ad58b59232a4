"""Chats that cannot be saved say so during a reply and when quitting."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from textual import events
from textual.pilot import Pilot

from edgespec.chat.prompt_history import PromptHistory
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.tui.app import ChatApp, run_chat
from edgespec.tui.attachments import Attachment
from edgespec.tui.downloads import Download
from edgespec.tui.widgets.messages import Panel
from tests.raising import raises
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading

SLOW = Script(text=LONG_TEXT, pause_seconds=0.005)


class TestUnsaved:
    @pytest.fixture
    def full_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)

    @pytest.mark.long
    @pytest.mark.usefixtures("full_disk")
    async def test_error_is_shown_once_during_a_reply(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("a question")
            await d.said("The chat 'a question' was not saved")
            await d.pilot.pause(2.5)
            assert len(d.chat.transcript.query(Panel)) == 1
            assert "the disk is full" in d.transcript()
            assert "Free some space" in d.transcript()
            assert "To save a copy elsewhere, type /export" in " ".join(d.transcript().split())

    async def test_an_unsaved_chat_is_opened_with_all_its_messages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            for text in ("one", "/new", "two", "/load one"):
                await d.say(text)
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", full)
                await d.say("unsaved")
                await d.said("were not saved")
                await d.say("/load two")
                await d.said("two")
                await d.say("/load one")
                await d.said("unsaved")
            await d.say("more")
            chat = d.app.store.load(d.chat.current_chat.id)
            assert [m.content for m in chat.messages if m.role == "user"] == ["one", "unsaved", "more"]
            assert not d.app.archive.unsaved

    @pytest.mark.usefixtures("full_disk")
    def test_leaving_says_what_was_not_saved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        quoted = ("'a question'", tmp_path / "chats", "disk is full")
        with raises(ChatFileError, *quoted, code="file_not_written"):
            _ask_and_quit(tmp_path, monkeypatch)

    def test_leaving_with_a_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A file in place of the folder also stops root, who may write to read-only folders.
        (tmp_path / "chats").write_text("")
        with raises(ChatFileError, "EDGESPEC_DATA_DIR", code="file_not_written"):
            _ask_and_quit(tmp_path, monkeypatch)

    @pytest.mark.long
    def test_leaving_after_saving_again_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fails = iter([OSError(errno.ENOSPC, ""), OSError(errno.ENOSPC, "")])
        real = os.fsync

        def sync(handle: int) -> None:
            if (error := next(fails, None)) is not None:
                raise error
            real(handle)

        monkeypatch.setattr(os, "fsync", sync)
        assert not _ask_and_quit(tmp_path, monkeypatch)
        assert len(ChatStore(tmp_path / "chats").list()) == 1


@pytest.mark.parametrize("how", ["the input", "an edit", "a waiting message", "a signal"])
def test_text_that_was_not_sent_is_in_the_history_of_the_next_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def use(d: Driver) -> None:
        await d.write("half a thought")
        if how == "an edit":
            d.chat.prompt.clear()
            await d.say("first")
            await d.write("half a thought")
            await d.press("ctrl+p")
            await d.write(", edited")
        elif how == "a waiting message":
            d.chat.prompt.clear()
            await d.send("first")
            await d.said("word word")
            await d.send("half a thought")
        if how == "a signal":
            d.app.leave_soon()
            await until(d.pilot, lambda: not d.app.is_running, "the end")
        else:
            await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime([SLOW] if how == "a waiting message" else []))
    prompts = PromptHistory(tmp_path).read()
    assert "half a thought" in prompts
    assert ("first, edited" in prompts) == (how == "an edit")


@pytest.mark.parametrize("how", ["an edit", "an earlier message", "another chat", "a closed terminal"])
def test_a_draft_that_is_no_longer_in_the_input_is_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pasted = "\n".join(f"line {number}" for number in range(20))

    async def use(d: Driver) -> None:
        await d.say("first")
        await d.say("/new")
        await d.say("second")
        d.app.post_message(events.Paste(pasted))
        await until(d.pilot, lambda: "[Pasted text" in d.chat.prompt.text, "the label")
        await d.write(" is it")
        if how == "an edit":
            await d.press("ctrl+p")
        elif how == "a closed terminal":
            await asyncio.to_thread(d.app.end_without_terminal)
        else:
            await d.press("up")
            assert d.chat.prompt.text == "second"
        if how == "another chat":
            await d.chat.send_text("/load first")
            await d.settled()
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime())
    prompts = PromptHistory(tmp_path).read()
    assert prompts.count(f"{pasted} is it") == 1
    assert how == "another chat" or prompts.count("second") == 1


async def test_going_back_to_the_draft_keeps_it_in_the_input(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.write("draft")
        await d.press("up", "down")
        assert d.chat.prompt.text == "draft"
        await d.press("up", "enter")
        await d.settled()
        await d.press("up", "up")
        assert d.chat.prompt.text == "draft"


def test_downloads_that_quitting_stops_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(d: Driver) -> None:
        downloads = d.chat.downloads._downloads
        downloads["8b"] = Download("8b", fraction=0.4)
        downloads["1b"] = Download("1b", fraction=1.0)
        downloads["1b"].ended.set()
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime())
    said = capsys.readouterr().err
    assert "The download of 8b was stopped at 40%." in said
    assert "/model 8b" in said
    assert "1b" not in said


def test_text_that_is_too_long_for_the_history_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "word " * 2500

    async def use(d: Driver) -> None:
        d.chat.prompt.replace_text(text)
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime())
    assert not PromptHistory(tmp_path).read()
    assert text.strip() in capsys.readouterr().err


@pytest.mark.parametrize("when", ["reading", "read"])
def test_a_message_whose_files_are_being_read_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    monkeypatch.chdir(tmp_path)
    text = "see @notes.txt " + "word " * 2500
    runtime = ScriptedRuntime()

    async def use(d: Driver) -> None:
        gate, read = asyncio.Event(), d.chat.chips.attachments

        async def slowly(references: Sequence[str]) -> Sequence[Attachment]:
            await gate.wait()
            return await read(references)

        monkeypatch.setattr(d.chat.chips, "attachments", slowly)
        await d.send(text)
        if when == "read":
            d.chat.begin_leaving()
            gate.set()
            await until(d.pilot, lambda: not d.chat.texts_being_read, "the files")
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, runtime)
    assert not runtime.asked
    assert text.strip() in capsys.readouterr().err


def test_an_unchanged_message_that_is_being_edited_is_not_unsent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(d: Driver) -> None:
        await d.say("first")
        await d.press("ctrl+p")
        assert d.chat.prompt.text == "first"
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime())
    assert capsys.readouterr().err == ""


def test_a_message_without_a_reply_is_in_the_chat_when_one_quits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(d: Driver) -> None:
        await d.send("a question")
        await until(d.pilot, lambda: d.chat.writing and bool(d.saved()), "the message")
        await d.press("ctrl+q")

    _use_and_quit(tmp_path, monkeypatch, use, ScriptedRuntime([Script(gate=threading.Event())]))
    assert capsys.readouterr().err == ""
    (chat,) = ChatStore(tmp_path / "chats").list()
    assert chat.unfinished


def _use_and_quit(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Driver], Awaitable[None]],
    runtime: ScriptedRuntime,
) -> None:
    """Run a chat without a terminal. `use` must end it."""

    async def drive(pilot: Pilot[object]) -> None:
        assert isinstance(pilot.app, ChatApp)
        d = Driver(pilot.app, cast("Pilot[None]", pilot))
        await d.settled()
        await use(d)

    real_run = ChatApp.run
    monkeypatch.setattr(ChatApp, "run", lambda app, **_: real_run(app, headless=True, auto_pilot=drive))
    run_chat(loading(runtime), store=ChatStore(folder / "chats"))


def _ask_and_quit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ask one question in a chat without a terminal, and quit after the reply."""

    async def use(pilot: Pilot[object]) -> None:
        assert isinstance(pilot.app, ChatApp)
        d = Driver(pilot.app, cast("Pilot[None]", pilot))
        await d.settled()
        await d.say("a question")
        await d.press("ctrl+q")
        if d.app.archive.unsaved:
            await d.sees("1 chat could not be saved")
            assert d.app.is_running
            await d.press("ctrl+q")

    real_run = ChatApp.run
    monkeypatch.setattr(ChatApp, "run", lambda app, **_: real_run(app, headless=True, auto_pilot=use))
    ended = run_chat(loading(ScriptedRuntime()), store=ChatStore(folder / "chats"))
    assert ended.resume == "last"
    return ended.signalled
