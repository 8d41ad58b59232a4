"""Expectations of a terminal program: suspending, help, lasting marks, Ctrl+C and refused commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from textual.containers import VerticalScroll
from textual.widgets import Static

from edgespec.chat.store import ChatStore
from edgespec.tui.screens.dialogs import SystemScreen
from edgespec.tui.screens.help import HelpScreen
from edgespec.tui.screens.models import ModelsScreen
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

LONG = "many words " * 1000


@pytest.mark.skipif(not hasattr(signal, "SIGTSTP"), reason="processes cannot be suspended")
@pytest.mark.parametrize("dialog", ["", "f5"])
async def test_ctrl_z_suspends_the_program_also_in_dialogs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialog: str
) -> None:
    signals: list[tuple[int, int]] = []
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        if dialog:
            await d.press(dialog)
            await until(d.pilot, lambda: isinstance(d.app.screen, SystemScreen), "the dialog")
        await d.write("zebra")
        with monkeypatch.context() as patch:
            driver = d.app._driver
            assert driver is not None
            patch.setattr(type(driver), "can_suspend", True)
            patch.setattr(os, "kill", lambda *call: signals.append(call))
            await d.press("ctrl+z")
        assert signals == [(os.getpid(), signal.SIGTSTP)]
        await d.press("ctrl+underscore")
        await until(d.pilot, lambda: "zebra" not in "\n".join(d.screen_text()), "undo with another key")


async def visible_headings(d: Driver) -> list[str]:
    """Return the headings of the help page that are on screen."""
    await until(d.pilot, lambda: isinstance(d.app.screen, HelpScreen), "the help page")
    await d.pilot.pause(0.1)
    view = d.app.screen.query_one(VerticalScroll).scrollable_content_region
    headings = d.app.screen.query(".help-heading").results(Static)
    return [str(each.content) for each in headings if view.contains_region(each.region)]


async def test_f1_opens_the_help_at_the_part_for_what_has_the_focus(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("hello")
        await d.press("f1")
        assert (await visible_headings(d))[0] == "Most used"
        await d.press("escape", "slash", "f1")
        assert (await visible_headings(d))[0] == "Commands"
        await d.press("escape")
        d.chat.prompt.clear()
        await d.press("shift+tab", "f1")
        # The last part is too short to begin at the top of the page.
        assert (await visible_headings(d))[-1] == "Keys for the selected message"
        await d.press("escape", "escape", "f2", "f1")
        assert (await visible_headings(d))[0] == "Keys for the list of chats"
        await d.press("escape", "f2", "f9")
        await until(d.pilot, lambda: isinstance(d.app.screen, ModelsScreen), "the list of models")
        await d.press("f1")
        assert "Keys for the list of models" in await visible_headings(d)
        await d.press("escape")
        assert isinstance(d.app.screen, ModelsScreen)


@pytest.mark.long
async def test_the_mark_of_a_stopped_reply_survives_forks_and_restarts(tmp_path: Path) -> None:
    scripts = [Script(LONG, pause_seconds=0.02), Script("The end.")]
    async with driving(loading(ScriptedRuntime(scripts=scripts)), tmp_path) as d:
        await d.send("one")
        await d.said("many words")
        await d.press("escape")
        await d.settled()
        assert d.transcript().splitlines()[-1] == "stopped"
        await d.say("/fork")
        await d.said("This is a new chat with 2 messages")
        assert "stopped" in d.transcript().splitlines()
    async with driving(loading(ScriptedRuntime(scripts=[Script("The end.")])), tmp_path, resume="last") as d:
        await until(d.pilot, lambda: "stopped" in d.transcript().splitlines(), "the mark")
        await d.say("/continue")
        assert "stopped" not in d.transcript().splitlines(), "the reply is complete now"
        (reply,) = (each for each in d.chat.current_chat.messages if each.role == "assistant")
        assert reply.ended_early == ""


async def test_a_reply_that_a_kill_interrupted_has_the_mark(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime(scripts=[Script(LONG, pause_seconds=0.02)])), tmp_path) as d:
        await d.send("one")
        await d.said("many words")
        d.chat.save_turn()
        (chat,) = ChatStore(tmp_path / "chats").list()
        saved = ChatStore(tmp_path / "chats").load(chat.id)
        assert saved.messages[-1].ended_early == "cancelled"
        await d.press("escape")
        await d.settled()


@pytest.mark.long
async def test_old_notes_leave_the_transcript(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("hello")
        for number in range(1, 8):
            await d.send(f"/set top_k {number}")
            await d.said(f"top_k is now {number}.")
        for number in range(1, 8):
            assert (f"top_k is now {number}." in d.transcript()) == (number > 2)
        await d.send("/show")
        await d.said("Model and settings")
        assert "top_k is now 3." not in d.transcript()
        await d.say("hello again")
        assert "top_k is now" not in d.transcript()
        assert "Model and settings" not in d.transcript()


@pytest.mark.parametrize("key", ["f1", "f5", "f6", "f9"])
async def test_ctrl_c_closes_a_dialog(tmp_path: Path, key: str) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press(key)
        await until(d.pilot, lambda: d.app.screen is not d.chat, "the dialog")
        await d.press("ctrl+c")
        await until(d.pilot, lambda: d.app.screen is d.chat, "the chat")
        assert d.app.is_running


@pytest.mark.long
async def test_a_command_refused_again_shows_a_notice(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:

        def shown() -> int:
            return sum("There is no preset" in line for line in d.screen_text())

        await d.say("/preset brief")
        await until(d.pilot, lambda: shown() == 1, "the note")
        await d.press("enter")
        await until(d.pilot, lambda: shown() == 2, "the note and a notice")


async def test_an_unknown_command_far_from_all_names_suggests_help(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/foo")
        await d.said("Unknown command /foo. Type /help for all commands. To send this")


async def test_the_error_for_a_removed_command_names_its_replacement(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/vi on")
        await d.said(
            "The command /vi was removed. Press Ctrl+G in the full-screen chat to write your message"
        )
