"""Writing prompts and reading replies in a text editor."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.usefixtures("_suspend")
@pytest.mark.parametrize(
    ("editor", "message"),
    [
        ("", "No text editor is set"),
        ("/missing/editor -x", "EDITOR is set to /missing/editor,"),
        ("code --wait", "EDITOR is set to code,"),
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


@pytest.mark.parametrize("failure", [OSError(8, "boom"), RuntimeError("boom"), KeyboardInterrupt()])
async def test_the_screen_returns_whatever_fails_while_it_is_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    modes: list[str] = []
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        driver = d.app._driver
        assert driver is not None
        with monkeypatch.context() as patched:
            patched.setattr(type(driver), "can_suspend", True)
            patched.setattr(driver, "suspend_application_mode", lambda: modes.append("suspended"))
            patched.setattr(driver, "resume_application_mode", lambda: modes.append("resumed"))
            with pytest.raises(type(failure)), d.app.suspend():
                raise failure
        assert modes == ["suspended", "resumed"]


@pytest.mark.usefixtures("_suspend")
@pytest.mark.parametrize("keys", [("/editor", "enter"), ("shift+up", "o")])
async def test_a_reply_cannot_be_opened_without_an_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, str]
) -> None:
    monkeypatch.setenv("EDITOR", "missing-editor")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("hello")
        if keys[0].startswith("/"):
            await d.say(keys[0])
        else:
            await d.press(*keys)
        await d.sees("is set to missing-editor,")


@pytest.mark.usefixtures("_suspend")
async def test_the_editor_needs_a_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write("some text")
        await d.press("ctrl+g")
        await d.sees("The editor true failed: no such file")
        assert d.chat.prompt.text == "some text"


@pytest.mark.long
def test_a_real_terminal_goes_on_after_an_editor_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "editor").write_bytes(b"\x7fELF no program")
    (tmp_path / "editor").chmod(0o700)
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"EDITOR": str(tmp_path / "editor"), "VISUAL": "", "TERM": "xterm-256color"}
        os.environ["EDGESPEC_DATA_DIR"] = str(tmp_path / "data")
        code = (
            "from edgespec.tui.app import run_chat; from tests.tui.scripted import *;"
            "run_chat(loading(ScriptedRuntime()))"
        )
        os.execv(sys.executable, (sys.executable, "-c", code))
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        _wait_for(terminal, b"Enter sends")
        os.write(terminal, b"\x07")
        _wait_for(terminal, b"exec format error")
        os.write(terminal, b"still")
        _wait_for(terminal, b"still")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _wait_for(terminal: int, text: bytes, seconds: float = 60) -> None:
    """Read from a pseudo-terminal until `text` is on the screen, which is written in pieces."""
    seen, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 1 << 16)
            if text in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", seen):
                return
    raise AssertionError(f"{text!r} did not appear in {seen[-2000:]!r}")


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
