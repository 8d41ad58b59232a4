"""Long pasted texts are one line in the input, and are sent whole."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from textual import events

from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, loading

LINES = "\n".join(f"line {number} of the text" for number in range(30))
LABEL = "[Pasted text 1: 30 lines, 150 tokens]"


async def paste(d: Driver, text: str) -> None:
    before = d.chat.prompt.text
    d.app.post_message(events.Paste(text))
    await until(d.pilot, lambda: d.chat.prompt.text != before, "the pasted text")


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
