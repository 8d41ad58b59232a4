"""Invalid environment variables of Textual, the order of fast keys, and control characters in saved chats.

Text in other encodings and pasted control characters do not end the chat or act as keys.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import textual.message
from textual import constants, events
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Input, TextArea

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ConfigurationError
from edgespec.tui.app import run_chat
from edgespec.tui.screens.dialogs import SystemScreen
from edgespec.tui.screens.models import ModelsScreen
from edgespec.tui.textual_guards import InputParser, pasted_text
from edgespec.tui.worker import Load
from tests.raising import raises
from tests.tui.driving import NOON, Driver, driving, save_chat, until
from tests.tui.scripted import ScriptedRuntime, loading

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2067"


def save(folder: Path, *titles: str) -> ChatStore:
    """Save chats with these titles, the newest first."""
    store = ChatStore(folder / "chats")
    for number, title in enumerate(titles):
        tree = MessageTree.linear([Message("user", title)])
        store.save(SavedChat(f"id-{number}", tree, NOON, NOON.replace(minute=59 - number)))
    return store


def titles(d: Driver) -> list[str]:
    return [each.chat.title for each in d.chat.sidebar.found]


def drawn(d: Driver) -> str:
    """All that the widgets of the screen draw."""
    widgets = [widget for widget in d.app.screen.walk_children(Widget) if widget.size.area]
    strips = [line for w in widgets for line in w.render_lines(Region(0, 0, *w.size))]
    return "\n".join(strip.text for strip in strips)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLOR_SYSTEM", "zzz"),
        ("COLOR_SYSTEM", ""),
        ("DRIVER", "a:b"),
        ("DRIVER", ""),
        ("DRIVER", "os:path"),
        ("DRIVER", "textual.driver.Driver"),
        ("MAX_FPS", 10**9),
        ("LOG_FILE", "/none/x"),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, demo: Load, name: str, value: str | int
) -> None:
    monkeypatch.setattr(constants, name, value)
    variable = {"MAX_FPS": "FPS", "LOG_FILE": "LOG"}.get(name, name)
    with raises(ConfigurationError, f"TEXTUAL_{variable} is {value!r}"):
        run_chat(demo)


def test_a_missing_folder_for_screenshots(monkeypatch: pytest.MonkeyPatch, demo: Load) -> None:
    monkeypatch.setattr(constants, "SCREENSHOT_DELAY", 1)
    monkeypatch.setattr(constants, "SCREENSHOT_LOCATION", "/none")
    with raises(ConfigurationError, "'/none'"):
        run_chat(demo)


async def test_a_slash_in_the_list_of_chats_starts_a_command(tmp_path: Path) -> None:
    save(tmp_path, "sorting", "searching")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast("f2", *"/search sort", "enter", *"ing")
        await until(d.pilot, lambda: titles(d) == ["sorting"], "the search")
        assert d.chat.prompt.text == ""
        assert not d.chat.current_chat.entries
        await d.sees("Chats: sorting")


@pytest.mark.long
async def test_a_slash_in_a_search_is_searched(tmp_path: Path) -> None:
    save(tmp_path, "either/or", "either way")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast("f2", *"her/o")
        await until(d.pilot, lambda: titles(d) == ["either/or"], "the search")
        assert d.chat.prompt.text == ""


@pytest.mark.long
async def test_a_message_is_typed_at_once_after_a_chat_is_opened(tmp_path: Path) -> None:
    save(tmp_path, "sorting", "searching")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast("f2", *"sear", "enter", *"Hello")
        await until(d.pilot, lambda: d.chat.prompt.text == "Hello", "the message")
        assert d.chat.current_chat.shown_title == "searching"


async def test_a_deletion_concerns_the_chat_that_was_highlighted(tmp_path: Path) -> None:
    save(tmp_path, "first", "second", "third")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast("f2", "down", "delete", *"t")
        await until(d.pilot, lambda: titles(d) == ["first", "third"], "the deletion")
        await d.sees("Chats: t")


@pytest.mark.long
@pytest.mark.parametrize("opening", [["f9"], [*"/model", "enter"]], ids=["key", "command"])
async def test_the_list_of_models_takes_what_is_typed_at_once(tmp_path: Path, opening: list[str]) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast(*opening, *"/mlx")
        await until(d.pilot, lambda: isinstance(d.app.screen, ModelsScreen), "the list")
        await d.sees("demo-mlx ")
        await until(d.pilot, lambda: d.app.screen.query_one(Input).value == "/mlx", "the filter")
        assert d.chat.prompt.text == ""


async def test_dialogs_take_what_is_typed_at_once(tmp_path: Path) -> None:
    store = save(tmp_path, "sorting")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast("f5", *"Be brief.")
        await until(d.pilot, lambda: isinstance(d.app.screen, SystemScreen), "the dialog")
        area = d.app.screen.query_one(TextArea)
        await until(d.pilot, lambda: area.text == "Be brief.", "the system prompt")
        await d.write_fast("ctrl+s", "f2", "ctrl+r", *" more", "enter")
        await until(d.pilot, lambda: store.load("id-0").title == "sorting more", "the title")
        assert d.chat.current_chat.system == "Be brief."


@pytest.mark.long
async def test_an_edited_message_takes_what_is_typed_at_once(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("How do I list files")
        await d.write_fast("shift+up", "up", "e", *" by date?")
        await until(d.pilot, lambda: d.chat.prompt.text.endswith("files by date?"), "the edit")
        assert d.chat.editing == 0


async def test_escape_works_while_a_widget_is_busy(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("f2")
        d.chat.sidebar.call_later(asyncio.sleep, 3)
        await d.write_fast("down", "escape", "x", wait=False)
        await asyncio.sleep(2)
        assert d.chat.prompt.text == "x"


async def test_the_chat_can_be_closed_while_many_keys_wait(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.write_fast(*"x" * 2000, wait=False)
        d.app.exit()


@pytest.mark.long
async def test_control_characters_in_a_saved_chat_are_not_drawn(tmp_path: Path) -> None:
    messages = (Message("user", f"asked{EVIL}"), Message("assistant", f"said{EVIL}\n\n```\ncode{EVIL}\n```"))
    save_chat(tmp_path, *messages, title=f"title{EVIL}" + "x" * 5000)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one", size=(120, 40)) as d:
        await d.said("asked")
        await d.pilot.press("f2")
        await d.pilot.pause(0.1)
        shown = drawn(d)
    for word in ("asked", "said", "code", "title"):
        assert word in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert shown.count("x") < 500


PASTE = "\x1b[200~{}\x1b[201~"
# A chat's app is too slow to start for this test, so this app reads keys with the same driver and guard.
PROGRAM = """
import sys
from textual.app import App
from edgespec.tui.textual_guards import guard_input

log = open(sys.argv[1], "a", buffering=1)

class Probe(App):
    def on_mount(self):
        log.write("ready\\n")
    def on_key(self, event):
        if event.key == "q":
            self.exit()
        log.write(f"key {ascii(event.character)}\\n")
    def on_paste(self, event):
        log.write(f"paste {ascii(event.text)}\\n")

app = Probe()
guard_input(app.driver_class)
app.run()
sys.exit(app.return_code)
"""


def parsed(*reads: str) -> list[tuple[str, str | None]]:
    """Return the keys and pasted text in the terminal's input."""
    parser = InputParser()
    found: list[textual.message.Message] = [event for data in reads for event in parser.feed(data)]
    return [
        ("paste", each.text) if isinstance(each, events.Paste) else ("key", each.character)
        for each in found
        if isinstance(each, events.Paste | events.Key)
    ]


class TestPastedText:
    @pytest.mark.parametrize(
        ("pasted", "expected"),
        [
            ("plain \u202e\u00e9 text", "plain \u202e\u00e9 text"),
            ("two\r\nlines\rand\n\tmore", "two\nlines\nand\n\tmore"),
            ("\x1b[1;31mred\x1b[0m and \x1b]0;title\x07\x1b]8;;http://x\x1b\\link", "red and link"),
            ("\x07\x00\x1b\x7f\x9b\x03\x1a\x1b[", "["),
            ("", ""),
        ],
    )
    def test_only_text_remains(self, pasted: str, expected: str) -> None:
        assert pasted_text(pasted) == expected
        assert parsed(PASTE.format(pasted), "a") == [("paste", expected), ("key", "a")]

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
    def test_reads_of_any_size(self, size: int) -> None:
        sent = "a" + PASTE.format("one\x1b[31m\rtwo\x1b[20") + "b" + PASTE.format("\x07three") + "c"
        reads: Sequence[str] = [sent[start : start + size] for start in range(0, len(sent), size)]
        expected = [("key", "a"), ("paste", "one\ntwo[20"), ("key", "b"), ("paste", "three"), ("key", "c")]
        assert parsed(*reads) == expected


def test_enter_before_the_chat_has_started_is_enter() -> None:
    """The terminal still converts it to a line feed, which is Ctrl+J, the key for a new line."""
    assert parsed("a\nb", "c\nd") == [
        ("key", "a"), ("key", "\r"), ("key", "b"), ("key", "c"), ("key", "\n"), ("key", "d")
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudoterminals of this kind")
def test_no_byte_closes_the_chat(tmp_path: Path) -> None:
    """Invalid UTF-8 arrives as U+FFFD, and pasted control characters do nothing."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    log = tmp_path / "log"
    log.touch()
    arguments = [sys.executable, "-c", PROGRAM, str(log)]
    process = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        sent = False
        while process.poll() is None:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    os.read(master, 1 << 16)
                except OSError:
                    break
            if not sent and "ready" in log.read_text():
                sent = True
                os.write(master, b"\xe9a\x1b[200~b\xff\xfe\x1b[31mc\x07\rd\x1b[201~q")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    assert log.read_text().splitlines() == [
        "ready",
        "key '\\ufffd'",
        "key 'a'",
        "paste 'b\\ufffd\\ufffdc\\nd'",
        "key 'q'",
    ]
