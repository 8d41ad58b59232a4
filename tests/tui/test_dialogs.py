"""Dialogs close with Ctrl+C, and a command that is rejected twice says so twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.driving import driving, until
from tests.tui.scripted import ScriptedRuntime, loading


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
