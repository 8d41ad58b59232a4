"""The list of chats: what is typed filters it, pinned chats come first, and deletions can be undone."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.chat.store import ChatStore
from edgespec.tui import archive
from edgespec.tui.archive import Archive
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading


def titles(d: Driver) -> list[str]:
    return [str(option.prompt).split("\n")[0].strip(" •") for option in d.chat.sidebar.options]


async def test_typing_filters_and_pinned_chats_come_first(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="Use ls."), Script(text="Use find.")])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("sorting")
        await d.say("/pin")
        await d.say("/new")
        await d.say("searching")
        await d.press("f2")
        assert titles(d) == ["sorting", "searching"]
        await d.write("find")
        assert titles(d) == ["searching"]
        await d.sees("Use find.")
        await d.write("x")
        await d.sees("No chat contains “findx”.")
        await d.press("escape")
        assert titles(d) == ["sorting", "searching"]
        await d.write("ls")
        await d.press("enter")
        await d.settled()
        assert d.chat.current_chat.shown_title == "sorting"
        assert d.chat.current_chat.pinned
        if d.chat.sidebar.display:
            await d.press("f2")
        await d.press("f2")
        assert titles(d) == ["sorting", "searching"]
        await d.press("f2")
        await d.say("/rename Sizes")
        await d.say("/pin")
        assert sorted(chat.title for chat in ChatStore(tmp_path / "chats").list()) == ["Sizes", "searching"]
        assert not any(chat.pinned for chat in ChatStore(tmp_path / "chats").list())


async def test_a_deletion_is_final_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(edgespec, "delete_data", deleted.append)
    monkeypatch.setattr("edgespec.tui.deletion.UNDO_SECONDS", 0.5)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.press("f2", "delete")
        await until(d.pilot, lambda: not d.saved(), "the deletion")
        await until(d.pilot, lambda: "prefix-cache" in deleted, "the end of the time for undo")
        assert not list(d.app.store.folder.glob(".*.deleted"))


def test_a_deletion_that_a_killed_program_did_not_finish_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(edgespec, "delete_data", deleted.append)
    path = tmp_path / ".one.deleted"
    path.write_text("{}")
    Archive(ChatStore(tmp_path)).finish_all_deletions()
    assert path.exists()
    monkeypatch.setattr(archive, "time", lambda: path.stat().st_mtime + 1000)
    Archive(ChatStore(tmp_path)).finish_all_deletions()
    assert not path.exists()
    assert "replies" in deleted
