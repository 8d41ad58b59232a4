"""Screens fit all terminals, and on small ones, the most useful lines of /show and the help come first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgespec.chat.message import Message
from tests.cases import covering, first
from tests.tui.driving import Driver, driving, save_chat, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

SIZES = first([(80, 24), (40, 12), (60, 20)], 2)


def visible(d: Driver) -> str:
    """The text on screen as one line."""
    return " ".join(" ".join(line.strip("│▌ ") for line in d.screen_text()).split())


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_show_begins_with_the_model_and_the_speed_up(tmp_path: Path, size: tuple[int, int]) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.say("a question")
        await d.say("/show")
        await d.sees("Model and settings")
        assert "Model and settings" in d.screen_text()[1]
        assert "model demo · 11.5 M parameters" in visible(d)
        assert "speed-up 1.6x as fast" in visible(d)
        if size[1] >= 20:
            assert "context 1,024 tokens" in visible(d)
        # The next message is at the end again, and so is the view.
        await d.say("another one")
        await d.sees("itself" if d.chat.transcript.origin else "-r")


@pytest.mark.long
async def test_changed_settings_come_before_the_defaults(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, settings={"seed": 7}) as d:
        await d.say("/show")
        shown = d.transcript()
        assert shown.index("seed") < shown.index("temperature")
        assert shown.rstrip().endswith("/models/demo.gguf")


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_memory_begins_with_its_first_line(tmp_path: Path, size: tuple[int, int]) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.say("/memory")
        await until(d.pilot, lambda: "model weights 12.0 MiB" in visible(d), "the first line")


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_help_begins_with_the_keys_that_everybody_needs(tmp_path: Path, size: tuple[int, int]) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.press("f1")
        await d.sees("Most used")
        shown = visible(d)
        for line in ("Enter send", "Esc stop the reply", "F3 show speed and memory", "Ctrl+Q quit"):
            assert line in shown, line
        if size[1] >= 20:
            assert "/show show the model" in shown


async def test_a_panel_that_covers_a_small_screen_does_not_open_at_the_next_start(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(60, 20)) as d:
        await d.press("f3")
        await d.sees("Speed")
        assert not d.chat.preferences.details


@pytest.mark.long
async def test_selecting_a_message_closes_a_panel_that_covers_it(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime([Script("The answer.")])), tmp_path, size=(40, 20)) as d:
        await d.say("a question")
        await d.press("f3")
        await until(d.pilot, lambda: "The answer." not in visible(d), "the panel")
        await d.press("shift+up")
        await d.sees("The answer.")
        await d.sees("e edit")


async def test_a_chat_opened_from_a_list_that_covers_the_screen_fills_it(tmp_path: Path) -> None:
    save_chat(tmp_path, Message("user", "a question"), Message("assistant", "word " * 30))
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(40, 20)) as d:
        await d.press("f2")
        await d.press("down", "enter")
        await d.sees("word word")
        await d.sees("a question")


@pytest.mark.long
async def test_the_text_at_the_top_stays_in_place_when_the_width_changes(tmp_path: Path) -> None:
    replies = ["\n\n".join(f"Fact {n}.{fact}: " + "word " * 50 for fact in range(9)) for n in range(4)]
    async with driving(loading(ScriptedRuntime([Script(each) for each in replies])), tmp_path) as d:
        for n in range(4):
            await d.say(f"question {n}")
        await d.press("pageup", "pageup", "pageup")
        await d.pilot.pause(0.2)
        before = d.screen_text()
        fact = re.findall(r"Fact \d\.\d", "\n".join(before))[0]
        for width in (*range(79, 39, -3), *range(41, 80, 2)):
            await d.pilot.resize_terminal(width, 24)
            await d.sees(fact)
        await d.pilot.resize_terminal(80, 24)
        await until(d.pilot, lambda: d.screen_text() == before, "the same screen")


# Maximum length of a readable line of text, in cells.
LONGEST_LINE = 130


def closes(driver: Driver) -> bool:
    """Whether the screen says how to close a dialog."""
    shown = "\n".join(driver.screen_text())
    return "Esc closes" in shown or "Esc cancels" in shown


@pytest.mark.long
@pytest.mark.parametrize(("size", "light"), covering([(40, 20), (200, 60), (300, 80)], [False, True]))
async def test_nothing_is_cut_off(tmp_path: Path, size: tuple[int, int], light: bool) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size, light=light) as d:
        await d.say("How do I list files by size?")
        for key, close in (("f1", "escape"), ("f5", "escape"), ("f6", "escape"), ("f2", "f2"), ("f3", "f3")):
            await d.press(key)
            if key in ("f1", "f5", "f6"):
                await until(d.pilot, lambda: closes(d), f"the dialog of {key}")
            else:
                await d.pilot.pause(0.2)
            shown = d.screen_text()
            assert all(len(line) <= size[0] for line in shown), key
            # Only the header may truncate model names.
            assert not [line for line in shown[1:] if "…" in line], key
            await d.press(close)
            await d.pilot.pause(0.1)


async def test_lines_are_not_as_wide_as_a_wide_terminal(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(300, 80)) as d:
        await d.pilot.pause(0.2)
        lines = [" ".join(line.split()) for line in d.screen_text()[1:] if "─" not in line]
        assert 60 < max(map(len, lines)) <= LONGEST_LINE
