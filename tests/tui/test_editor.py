"""Writing prompts and reading replies in a text editor."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from edgespec.tui.app import ChatApp
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading


@pytest.fixture
def _suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the app's method that hands the terminal to the editor, because tests have no terminal."""

    def suspend(_app: ChatApp) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(ChatApp, "suspend", suspend)
    monkeypatch.delenv("VISUAL", raising=False)


def _script(folder: Path, code: str) -> str:
    path = folder / "my editor"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o700)
    return f"'{path}'"


@pytest.mark.usefixtures("_suspend")
async def test_a_prompt_is_written_in_the_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv(
        "VISUAL", _script(tmp_path, 'echo " and more é" >> "$1"; stat -c %a "$(dirname "$1")" > mode')
    )
    monkeypatch.chdir(tmp_path)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("some text")
        await d.press("ctrl+g")
        assert d.chat.prompt.text == "some text and more é"
        assert Path("mode").read_text() == "700\n"
        await d.press("!")
        assert d.chat.prompt.text == "some text and more é!"


@pytest.mark.usefixtures("_suspend")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("exit 3", "exited with status 3"),
        ("kill -INT $$", "was interrupted"),
        ('rm "$1"', "failed: no such file"),
        ('printf "\\377" > "$1"', "UTF-8"),
        ('rm "$1"; mkfifo "$1"', "regular"),
    ],
)
async def test_an_editor_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setenv("EDITOR", _script(tmp_path, code))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("some text")
        await d.press("ctrl+g")
        await d.sees(message)
        assert d.chat.prompt.text == "some text"


@pytest.mark.usefixtures("_suspend")
@pytest.mark.parametrize(
    ("editor", "message"),
    [
        ("", "No text editor is set"),
        ("/missing/editor -x", "The editor /missing/editor failed"),
        ("nano 'a", "EDITOR is not a valid command"),
    ],
)
async def test_a_missing_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editor: str, message: str
) -> None:
    monkeypatch.setenv("EDITOR", editor)
    monkeypatch.setenv("PATH", "/missing")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("some text")
        await d.press("ctrl+g")
        await d.sees(message)
        assert d.chat.prompt.text == "some text"


@pytest.mark.usefixtures("_suspend")
async def test_a_common_editor_opens_if_none_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    _script(tmp_path, 'printf changed > "$1"')
    (tmp_path / "my editor").rename(tmp_path / "bin" / "vi")
    monkeypatch.setenv("EDITOR", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("some text")
        await d.press("ctrl+g")
        assert d.chat.prompt.text == "changed"


async def test_a_terminal_that_cannot_be_suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "true")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("ctrl+g")
        await d.sees("An editor cannot be opened in this terminal")


@pytest.mark.usefixtures("_suspend")
async def test_the_last_reply_is_opened_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", _script(tmp_path, f'cp "$1" "{tmp_path}/seen"; echo changed > "$1"'))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/editor")
        await d.sees("There is no reply to open yet.")
        await d.say("hello")
        before = d.chat.current_chat.messages
        await d.press("shift+up", "up", "o")
        assert (tmp_path / "seen").read_text() == "hello"
        await d.press("escape")
        await d.say("/editor")
        assert (tmp_path / "seen").read_text() == before[-1].content
        assert d.chat.current_chat.messages == before
