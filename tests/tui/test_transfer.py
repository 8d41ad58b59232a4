"""`/export` writes the open chat to a file, and `/import` adds exported chats."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.chat.importing import ExportedChats
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.tui.archive import Archive
from tests.tui.driving import driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


async def test_a_chat_is_exported_and_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with driving(loading(ScriptedRuntime(scripts=[Script(text="Use `ls`.")])), tmp_path) as d:
        await d.say("/export")
        await d.said("There is nothing to export")
        d.chat.prompt.clear()
        await d.say("How?")
        for name in ("", "chat.html", "chat.json"):
            await d.say(f"/export {name}")
            await d.said(f"Exported this chat to {tmp_path / (name or 'How.md')}")
        assert "**Model:**\n\nUse `ls`." in (tmp_path / "How.md").read_text("utf-8")
        assert "<code>ls</code>" in (tmp_path / "chat.html").read_text("utf-8")
        await d.say("/export chat.json")
        await d.said("chat.json already exists")
        d.chat.prompt.clear()
        await d.say("/export chat.pdf")
        await d.said("from the name 'chat.pdf'")
        d.chat.prompt.clear()
        await d.say("/import chat.json")
        await d.said("Imported 1 chat from chat.json.")
        one, other = (ChatStore(path.parent).load(path.stem) for path in d.saved())
        assert one.messages == other.messages


async def test_import_says_what_is_left_out(tmp_path: Path) -> None:
    message = {"uuid": "1", "sender": "human", "text": "Q", "files": [{}, {}]}
    path = tmp_path / "claude.json"
    path.write_text(json.dumps([{"name": "T", "chat_messages": [message]}, {}]))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say(f"/import {path}")
        await d.said("Imported 1 chat from claude.json. Press F2 for the list of chats. Not imported:")
        await d.said("attached files (2);")
        await d.said("chats that are damaged or in an unknown format (1).")
        path.write_text("{")
        await d.say(f"/import {path}")
        await d.said("it is not valid JSON")
        await d.say("/import")
        await d.said("/import needs the path of a file")


async def test_the_screen_is_drawn_during_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    path.write_text("[]")
    gate, add = threading.Event(), Archive.add

    def slowly(archive: Archive, chats: ExportedChats) -> None:
        gate.wait(20)
        add(archive, chats)

    monkeypatch.setattr(Archive, "add", slowly)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.send(f"/import {path}")
        d.chat.prompt.replace_text("typed meanwhile")
        drawn = lambda: "typed meanwhile" in "\n".join(d.screen_text())  # noqa: E731
        await until(d.pilot, drawn, "the text", seconds=5)
        await d.say("hello")
        assert len(d.chat.current_chat.entries) == 2
        gate.set()
        await d.said("contains no chats in a known format")


def test_an_import_looks_for_old_temporary_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    monkeypatch.setattr("edgespec.chat.store.delete_stale_temporaries", folders.append)
    store = ChatStore(tmp_path)
    chat = SavedChat("", MessageTree.linear([Message("user", "Q")]), NOON, NOON)
    for _ in range(5):
        store.add(chat)
    assert folders == [tmp_path]


@pytest.mark.long
@pytest.mark.parametrize("name", ["~nobody-has-this-name/chat.md", "a\0b.md", "\ud800.md"])
async def test_impossible_paths_are_reported(tmp_path: Path, name: str) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("How?")
        await d.say(f"/export {name}")
        await d.said("Cannot write ")
        d.chat.prompt.clear()
        await d.say(f"/import {name}")
        await d.sees("not a chat export" if "~" not in name else "annot read ")
