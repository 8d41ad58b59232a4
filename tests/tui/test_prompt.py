"""The input: lines, history, completion, pasting, and where keys go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from textual import events

from edgespec.chat.prompt_history import PromptHistory
from edgespec.tui.screens.help import HelpScreen
from tests.tui.driving import driving, until
from tests.tui.scripted import ScriptedRuntime, loading


@pytest.mark.long
async def test_new_lines_and_sending(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await d.write("one")
        await d.press("ctrl+j")
        await d.write("two")
        await d.press("shift+enter")
        await d.write("three")
        assert d.chat.prompt.text == "one\ntwo\nthree"
        await d.press("enter")
        await d.settled()
        assert runtime.asked[0][1] == "one\ntwo\nthree"
        await d.press("enter", "space", "enter")
        assert len(runtime.asked) == 1


async def test_enter_starts_a_new_line_within_triple_quotes(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        for line in ('"""', "def f():", '    """Return one."""', "    return 1"):
            await d.write(line)
            await d.press("enter")
        assert not runtime.asked
        await d.sees('A line with only """ sends the message')
        await d.write('"""')
        await d.press("enter")
        await d.settled()
        assert runtime.asked[0][1].strip() == 'def f():\n    """Return one."""\n    return 1'


async def test_history_at_the_first_and_last_line(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.say("second\nof two lines")
        await d.write("unsent")
        await d.press("up")
        assert d.chat.prompt.text == "second\nof two lines"
        await d.press("up")
        assert d.chat.prompt.text == "second\nof two lines"
        await d.press("up")
        assert d.chat.prompt.text == "first"
        await d.press("down", "down", "down")
        assert d.chat.prompt.text == "unsent"


@pytest.mark.long
async def test_a_paste_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("before")
        d.app.post_message(events.Paste("word " * 200_000))
        await d.sees("The pasted text has 1,000,000 characters")
        assert d.chat.prompt.text == "before"
        d.app.post_message(events.Paste(" after"))
        await d.pilot.pause(0.1)
        assert d.chat.prompt.text == "before after"


async def test_a_paste_keeps_its_lines_and_a_question_mark_in_it_is_text(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        d.app.post_message(events.Paste("? a\nb 🙂 日本"))
        await d.pilot.pause(0.1)
        assert d.chat.prompt.text == "? a\nb 🙂 日本"
        await d.write("?")
        assert not isinstance(d.app.screen, HelpScreen)


async def test_tab_completes_a_command(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("/the")
        await d.press("tab")
        assert d.chat.prompt.text == "/theme "
        await d.write("light")
        await d.press("enter")
        await d.settled()
        assert d.app.theme == "edgespec-light"


@pytest.mark.long
async def test_tab_keeps_the_focus_while_a_command_is_typed(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("/rename per")
        await d.press("tab")
        assert d.chat.prompt.has_focus
        assert d.chat.prompt.text == "/rename per"
        await d.press("shift+tab")
        assert not d.chat.prompt.has_focus


@pytest.mark.long
async def test_the_input_hints_at_commands(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("/")
        await d.sees("/help /show /model /set")
        await d.sees("… F1 lists all")
        await d.write("reg")
        await d.sees("/regen · generate another reply to your last message")
        await d.press("backspace", "backspace", "backspace")
        await d.write("set")
        await d.sees("/set [name value] · show the settings, or change one")
        await d.write(" temperature 1")
        await d.sees("/set [name value]")
        # Another name of a command also leads to it.
        d.chat.prompt.replace_text("/sav")
        await d.sees("/rename [title] · give this chat another title")
        d.chat.prompt.clear()
        await d.write("/sav")
        await d.press("tab")
        assert d.chat.prompt.text.startswith("/save")
        d.chat.prompt.replace_text("/etc/hosts")
        await d.sees("Enter sends")


async def test_letters_typed_elsewhere_go_to_the_input(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        d.chat.transcript.focus()
        await d.write("hi")
        assert d.chat.prompt.text == "hi"


async def test_control_d_on_the_empty_input_quits(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("x")
        await d.press("ctrl+d")
        await d.pilot.pause(0.2)
        assert d.chat.prompt.text == "x"
        await d.press("backspace", "ctrl+d")
        await until(d.pilot, lambda: not d.app.is_running, "the app to end")


@pytest.mark.long
async def test_prompts_of_earlier_runs_are_offered(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first\nof two lines")
        await d.say("/show")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("up")
        assert d.chat.prompt.text == "/show"
        await d.press("up", "up")
        assert d.chat.prompt.text == "first\nof two lines"


def test_the_file_is_private_and_limited(tmp_path: Path) -> None:
    history, path = PromptHistory(tmp_path / "data"), tmp_path / "data" / "prompt-history.jsonl"
    assert history.read() == []
    for number in range(600):
        history.add(f"{number} é\n" + "x" * 2_000)
    history.add("y" * 10_001)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size > 1 << 20
    prompts = history.read()
    assert [prompts[0].split()[0], prompts[-1].split()[0], len(prompts)] == ["100", "599", 500]
    assert history.read() == prompts
    assert path.stat().st_size < 1 << 20 or len(path.read_bytes().splitlines()) == 500


@pytest.mark.parametrize("damage", [b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"1\n"])
def test_damaged_lines_are_skipped(tmp_path: Path, damage: bytes) -> None:
    history = PromptHistory(tmp_path)
    history.add("one")
    with (tmp_path / "prompt-history.jsonl").open("ab") as file:
        file.write(damage)
    history.add("two")
    assert history.read() == ["one", "two"]


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = PromptHistory(tmp_path / "file")
    history.add("one")
    assert history.read() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_named_pipe_in_the_place_of_the_file_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompt-history.jsonl")
    history = PromptHistory(tmp_path)
    history.add("first")
    assert history.read() == []
