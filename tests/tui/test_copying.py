"""Copying code blocks, by key, command and mouse, and copying the chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.tui.widgets.reply_markdown import ReplyMarkdown
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading

THREE = "First:\n\n```sh\nls -l\n```\n\nThen:\n\n```py\nprint(1)\nprint(2)\n```\n\n    indented\n"


@pytest.fixture(autouse=True)
def _no_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.tui.desktop._copy_with_desktop_tool", lambda text: None)


async def _copied(d: Driver, text: str, said: str) -> None:
    await d.sees(said)
    assert d.app.clipboard == text


async def test_the_key_copies_one_block_after_the_other(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime(scripts=[Script(text=THREE)] * 2)), tmp_path) as d:
        await d.press("ctrl+o")
        await d.sees("There is no code block to copy yet.")
        await d.say("hello")
        for number, code in ((3, "indented"), (2, "print(1)\nprint(2)"), (1, "ls -l"), (3, "indented")):
            await d.press("ctrl+o")
            await _copied(d, code, f"Copied the code block ({number} of 3).")
        await d.press("ctrl+o")
        await d.say("again")
        await d.press("ctrl+o")
        assert d.app.clipboard == "indented"


@pytest.mark.long
async def test_the_command_copies_a_block_by_its_number(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime(scripts=[Script(text=THREE)])), tmp_path) as d:
        await d.say("hello")
        await d.say("/copy code 2")
        await _copied(d, "print(1)\nprint(2)", "Copied the code block (2 of 3).")
        for number in ("0", "4", "two"):
            d.chat.prompt.clear()
            await d.say(f"/copy code {number}")
            await d.said(f"There is no code block {number}. The last reply has 3 code blocks.")


async def test_a_click_copies_a_block(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime(scripts=[Script(text=THREE)])), tmp_path, size=(80, 40)) as d:
        await d.say("hello")
        reply = d.chat.transcript.query_one(ReplyMarkdown)
        row = next(y for y in range(reply.size.height) if "print(1)" in reply.render_line(y).text)
        right = reply.size.width - 3
        assert "copy" not in "\n".join(d.screen_text())
        await d.pilot.hover(reply, offset=(2, row + 1))
        await until(d.pilot, lambda: " copy " in reply.render_line(row).text, "the copy mark")
        await d.pilot.click(reply, offset=(right, row + 1))
        assert not d.app.clipboard
        await d.pilot.click(reply, offset=(right, row))
        await _copied(d, "print(1)\nprint(2)", "Copied the code block.")
        await d.pilot.hover(reply, offset=(2, 0))
        await until(d.pilot, lambda: " copy " not in reply.render_line(row).text, "the end of the mark")


async def test_the_code_blocks_of_a_selected_message(tmp_path: Path) -> None:
    scripts = [Script(text=THREE), Script(text="None here.")]
    async with driving(loading(ScriptedRuntime(scripts=scripts)), tmp_path) as d:
        await d.say("hello")
        await d.say("again")
        await d.say("/copy code 2")
        await d.said("The last reply has no code block.")
        d.chat.prompt.clear()
        await d.press("shift+up", "b")
        await d.sees("There is no code block to copy yet.")
        await d.press("up", "up", "b", "b")
        await _copied(d, "print(1)\nprint(2)", "Copied the code block (2 of 3).")


async def test_the_chat_is_copied_with_the_reply_that_is_being_written(tmp_path: Path) -> None:
    slow = Script(text=LONG_TEXT, pause_seconds=0.01)
    async with driving(loading(ScriptedRuntime(scripts=[slow])), tmp_path) as d:
        await d.send("hello")
        await d.said("word word")
        await d.send("/copy chat")
        await d.sees("Copied the chat.")
        assert d.app.clipboard.startswith("**You:**\n\nhello\n\n**Model:**\n\nword word")
        await d.send(f"/export {tmp_path / 'chat.md'}")
        await d.said("Exported this chat")
        assert "word word" in (tmp_path / "chat.md").read_text("utf-8")
        assert d.chat.writing
        await d.press("escape")
        await d.settled()
