"""The list of chats: typing filters it, pinned chats come first, and deletions can be undone."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.api import saved_data
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.tui import archive
from edgespec.tui.archive import Archive
from edgespec.tui.preferences import Preferences
from edgespec.tui.widgets.sidebar import Sidebar
from tests.raising import raises
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def titles(d: Driver) -> list[str]:
    return [each.chat.title for each in d.chat.sidebar.found]


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
        await d.send("/rename")
        await d.sees("Rename chat")
        await d.press("home", *"My ", "enter")
        await d.sees("This chat is saved as “My sorting”.")
        await d.say("/rename Sizes")
        await d.say("/pin")
        assert sorted(chat.title for chat in ChatStore(tmp_path / "chats").list()) == ["Sizes", "searching"]
        assert not any(chat.pinned for chat in ChatStore(tmp_path / "chats").list())


@pytest.mark.long
async def test_a_fork_with_a_long_title_is_told_apart(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("How do I find the largest files below a folder?")
        await d.say("/fork")
        await d.press("f2")
        shown = [d.chat.sidebar.render_line(row).text.rstrip()[-8:] for row in (0, 2)]
        assert sorted(shown) == ["gest fi…", "… (fork)"]


async def test_chats_are_renamed_pinned_and_restored_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda kind: 0)
    store = ChatStore(tmp_path / "chats")
    for number, name in enumerate(("oldest", "older")):
        tree = MessageTree.linear([Message("user", name)])
        store.save(SavedChat(name, tree, NOON, NOON.replace(minute=number)))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("newest")
        await d.press("f2")
        await d.sees("Ctrl+R renames · Ctrl+P pins")
        await d.press("down", "ctrl+r", *"X", "enter")
        await until(d.pilot, lambda: store.load("older").title == "olderX", "the new title")
        await until(d.pilot, lambda: titles(d) == ["newest", "olderX", "oldest"], "the list")
        assert d.chat.sidebar.chat.id == "older"  # type: ignore[union-attr]
        await d.press("down", "ctrl+p")
        await until(d.pilot, lambda: titles(d) == ["oldest", "newest", "olderX"], "the pinned chat")
        assert store.load("oldest").pinned
        await d.press("ctrl+p")
        await until(d.pilot, lambda: titles(d) == ["newest", "olderX", "oldest"], "the order of before")
        await d.press("delete")
        await until(d.pilot, lambda: titles(d) == ["newest", "olderX"], "the deletion")
        await d.press("ctrl+underscore")
        await until(d.pilot, lambda: titles(d) == ["newest", "olderX", "oldest"], "the restored chat")
        assert d.chat.sidebar.chat.id == "oldest"  # type: ignore[union-attr]
        assert d.chat.current_chat.shown_title == "newest"
        await d.press("home", "ctrl+r", "home", *"My ", "enter")
        await until(d.pilot, lambda: d.chat.current_chat.title == "My newest", "the title of the open chat")
        await d.press("ctrl+r", "escape", "ctrl+p")
        await until(d.pilot, lambda: d.chat.current_chat.pinned, "the pin of the open chat")
        assert {chat.title for chat in store.list()} == {"My newest", "olderX", "oldest"}
        assert len(d.app.store.list()) == 3
        await d.press("escape", "ctrl+r")
        await d.settled()
        assert len(d.chat.current_chat.tree.messages) == 3


async def test_a_pin_that_cannot_be_saved_is_not_reported(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    path = store.save(SavedChat("old", MessageTree.linear([Message("user", "old")]), NOON, NOON))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("f2")
        assert titles(d) == ["old"]
        path.write_text("{", "utf-8")
        await d.press("ctrl+p")
        await d.said("is not a valid chat file")
        assert "Pinned" not in "\n".join(d.screen_text())


@pytest.mark.long
async def test_the_search_command_filters_the_list(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="Use ls."), Script(text="Use find.")])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("sorting")
        await d.say("/new")
        await d.say("searching")
        await d.say("/search ls")
        assert titles(d) == ["sorting"]
        await d.sees("Chats: ls")
        await d.press("backspace", "backspace")
        assert len(titles(d)) == 2
        await d.write("/show")
        assert d.chat.prompt.text == "/show"
        assert len(titles(d)) == 2


def test_a_chat_renamed_here_is_not_overwritten_by_another_program(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = SavedChat("one", MessageTree.linear([Message("user", "Q")]), NOON, NOON)
    store.save(chat)
    Archive(store).change("one", title="New name")
    saved = store.save_after(chat, NOON)
    assert saved.id != "one"
    assert store.load("one").title == "New name"


async def test_a_deletion_is_final_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(saved_data, "delete_data", deleted.append)
    monkeypatch.setattr("edgespec.tui.saved_chats.UNDO_SECONDS", 0.5)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.press("f2", "delete")
        await until(d.pilot, lambda: not d.saved(), "the deletion")
        await until(d.pilot, lambda: "prefix-cache" in deleted, "the end of the time for undo")
        assert not list(d.app.store.folder.glob(".*.deleted"))


async def test_choosing_the_open_chat_does_not_stop_its_reply(tmp_path: Path) -> None:
    gate = threading.Event()
    async with driving(loading(ScriptedRuntime([Script(), Script(gate=gate)])), tmp_path) as d:
        await d.say("first")
        chat = d.chat.current_chat
        await d.send("go on")
        await until(d.pilot, lambda: d.chat.writing, "the reply")
        await d.press("f2", "enter")
        await until(d.pilot, lambda: d.chat.prompt.has_focus, "the input")
        assert d.chat.writing
        gate.set()
        await d.settled()
        assert d.chat.current_chat is chat
        assert len(chat.entries) == 4
        await d.say("/load first")
        assert d.chat.current_chat is chat


async def test_the_open_chat_is_read_again_if_another_program_changed_it(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        Archive(ChatStore(tmp_path / "chats")).change(d.chat.current_chat.id, title="Another title")
        await d.say("/load Another")
        assert d.chat.current_chat.title == "Another title"


@pytest.mark.parametrize("key", ["ctrl+n", "ctrl+r", "ctrl+q"])
async def test_a_chat_deleted_during_its_reply_is_deleted_whatever_is_pressed_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda kind: 0)
    gate = threading.Event()
    script = Script(gate=gate, ignores_cancel=True)
    store = ChatStore(tmp_path / "chats")
    async with driving(loading(ScriptedRuntime([script])), tmp_path) as d:
        await d.send("first")
        await until(d.pilot, lambda: bool(d.saved()), "the file")
        stop = d.app.model_thread.cancel
        # The reply ends only after both keys.
        monkeypatch.setattr(d.app.model_thread, "cancel", lambda: None)
        await d.press("f2", "delete", "f2", key)
        monkeypatch.setattr(d.app.model_thread, "cancel", stop)
        gate.set()
        if key == "ctrl+q":
            await until(d.pilot, lambda: not d.app.is_running, "the end")
        else:
            await d.settled()
            await until(d.pilot, lambda: not d.saved(), "the deletion")
    assert not store.list()


async def test_undo_restores_what_was_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda kind: 0)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        for text in ("old", "/new", "new", "another"):
            await d.say(text)
        chat = d.chat.current_chat
        await d.say("/delete")
        assert len(chat.entries) == 2
        await d.press("f2", "down", "delete")
        await until(d.pilot, lambda: len(d.saved()) == 1, "the deletion")
        d.chat.prompt.focus()
        await d.say("/delete")
        assert not chat.entries
        await d.say("/undo")
        assert d.chat.current_chat is chat
        assert len(chat.entries) == 2
        await d.say("/undo")
        assert d.chat.current_chat.shown_title == "old"


def test_a_deletion_that_a_killed_program_did_not_finish_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(saved_data, "delete_data", deleted.append)
    path = tmp_path / ".one.deleted"
    path.write_text("{}")
    Archive(ChatStore(tmp_path)).finish_all_deletions()
    assert path.exists()
    monkeypatch.setattr(archive, "time", lambda: path.stat().st_mtime + 1000)
    Archive(ChatStore(tmp_path)).finish_all_deletions()
    assert not path.exists()
    assert "replies" in deleted


def test_files_that_are_no_chats_do_not_stop_the_deletion_of_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda kind: 0)
    (tmp_path / ".no chat.deleted").write_text("")
    (tmp_path / ".folder.deleted").mkdir()
    (tmp_path / ".one.deleted").write_text("{}")
    # This program deleted the chat, and another program has put a folder in its place.
    (tmp_path / "two.json").mkdir()
    chats = Archive(ChatStore(tmp_path))
    chats.hidden["two"] = 0.0
    monkeypatch.setattr(archive, "time", lambda: 1e10)
    with raises(ChatFileError, "two.json", code="file_not_written"):
        chats.finish_all_deletions()
    assert {path.name for path in tmp_path.iterdir()} == {".no chat.deleted", ".folder.deleted", "two.json"}


async def test_a_deleted_chat_that_another_program_continues_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda kind: 0)
    scripts = [Script(text="One."), Script(text="Two.")]
    async with driving(loading(ScriptedRuntime(scripts=scripts)), tmp_path) as one:
        await one.say("first")
        async with driving(loading(ScriptedRuntime(scripts=scripts)), tmp_path, resume="last") as other:
            await one.press("f2", "delete")
            await until(one.pilot, lambda: not one.saved(), "the deletion")
            await other.say("second")
            one.chat.prompt.focus()
            await one.say("/undo")
            titles = ["first", "first"]
            assert [chat.title for chat in ChatStore(tmp_path / "chats").list()] == titles
            assert "second" in "".join(path.read_text("utf-8") for path in one.saved())
            (chat_id,) = {path.stem for path in one.saved()} - {one.chat.current_chat.id}
            one.chat.archive.hide(chat_id)
            await other.say("third")
            one.chat.archive.finish_deletion(chat_id)
            assert "third" in other.app.store._path(chat_id).read_text("utf-8")
    assert not list(one.app.store.folder.glob(".*.deleted"))


def test_an_undo_that_fails_can_be_repeated(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    store.save(SavedChat("one", MessageTree.linear([Message("user", "Q")]), NOON, NOON))
    archive = Archive(store)
    archive.hide("one")
    (tmp_path / ".one.deleted").rename(tmp_path / "away")
    with raises(ChatFileError, "restore", code="file_not_written"):
        archive.restore()
    (tmp_path / "away").rename(tmp_path / ".one.deleted")
    restored = archive.restore()
    assert restored is not None
    assert restored.title == "Q"


async def test_the_time_for_undo_starts_again_with_each_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_data, "delete_data", lambda _kind: 0)
    monkeypatch.setattr("edgespec.tui.saved_chats.UNDO_SECONDS", 300.0)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.press("f2", "delete")
        await until(d.pilot, lambda: not d.saved(), "the deletion")
        (first_timer,) = d.chat.deletion_timers.values()
        await d.press("ctrl+underscore")
        await until(d.pilot, lambda: bool(d.saved()), "the restored chat")
        await d.press("delete")
        await until(d.pilot, lambda: not d.saved(), "the second deletion")
        (timer,) = d.chat.deletion_timers.values()
        assert timer is not first_timer
        assert first_timer._task is None or first_timer._task.cancelled() or first_timer._task.done()


@pytest.mark.parametrize("size", [(50, 20), (80, 24), (120, 40)])
async def test_escape_closes_the_list_during_a_reply_and_while_a_message_is_edited(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    gate = threading.Event()
    async with driving(loading(ScriptedRuntime([Script(), Script(gate=gate)])), tmp_path, size=size) as d:
        await d.say("first")
        await d.send("go on")
        await until(d.pilot, lambda: d.chat.writing, "the reply")
        await d.press("f2", "escape")
        assert not d.chat.sidebar.display
        assert d.chat.prompt.has_focus
        assert d.chat.writing
        gate.set()
        await d.settled()
        await d.press("ctrl+p", "f2", "escape")
        assert not d.chat.sidebar.display
        assert d.chat.editing is not None
        assert d.chat.prompt.text == "go on"


async def test_the_list_stays_closed_after_a_choice(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        await d.press("f2")
        await until(d.pilot, lambda: Preferences.read(tmp_path / "preferences.json").sidebar)
        # A double click chooses the chat twice.
        await d.write_fast("enter", "enter")
        d.chat.post_message(Sidebar.Chosen(d.chat.sidebar.found[0].chat))
        await d.settled()
        await until(d.pilot, lambda: not Preferences.read(tmp_path / "preferences.json").sidebar)
        assert not d.chat.sidebar.display
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        assert not d.chat.sidebar.display


@pytest.mark.parametrize(("size", "stays"), [((50, 20), False), ((80, 24), True)])
async def test_the_error_of_a_damaged_chat_is_not_covered_by_the_list(
    tmp_path: Path, size: tuple[int, int], stays: bool
) -> None:
    store = ChatStore(tmp_path / "chats")
    path = store.save(SavedChat("one", MessageTree.linear([Message("user", "one")]), NOON, NOON))
    path.write_text("{", "utf-8")
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.press("f2", "enter")
        await d.sees("not a valid chat file")
        assert d.chat.sidebar.display == stays
