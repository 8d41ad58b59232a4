"""Saved chats: used by two programs at the same time, resumed, exported and imported."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier

import pytest

import edgespec
from edgespec.chat.importing import ExportedChats
from edgespec.chat.message import AttachedFile, Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError, OptionError
from edgespec.model.image import Image
from edgespec.system.files import data_folder
from edgespec.tui.archive import Archive
from edgespec.tui.open_chat import ChatEntry, OpenChat
from tests.raising import raises
from tests.tui.driving import driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading


def opened(archive: Archive, chat_id: str) -> OpenChat:
    return OpenChat.opened(archive.load(chat_id), {})


def says(chat: OpenChat, text: str) -> None:
    for message in (Message("user", text), Message("assistant", f"{text}!")):
        chat.tree = chat.tree.add(ChatEntry(message), chat.tree.tip)


def fails_to_save(archive: Archive, chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a chat on a full disk."""

    def full(path: Path, *payload: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("edgespec.chat.store.write_private_file", full)
        with raises(ChatFileError, "disk is", code="file_not_written"):
            archive.save(chat, "demo")


def test_chat_changed_by_another_program_is_saved_as_a_second_one(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    one, other = Archive(store), Archive(store)
    mine = OpenChat()
    says(mine, "hello")
    one.save(mine, "demo")
    assert not one.branched
    theirs = opened(other, mine.id)
    assert theirs.id == mine.id
    says(mine, "mine")
    one.save(mine, "demo")
    assert not one.branched
    says(theirs, "theirs")
    other.save(theirs, "demo")
    assert other.branched
    assert theirs.id != mine.id
    other.branched = False
    says(theirs, "more")
    other.save(theirs, "demo")
    assert not other.branched
    assert store.load(mine.id).messages == mine.messages
    assert store.load(theirs.id).messages == theirs.messages


def test_chat_deleted_by_another_program_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    store = ChatStore(tmp_path)
    archive = Archive(store)
    chat = OpenChat()
    says(chat, "hello")
    archive.save(chat, "demo")
    chat_id = chat.id
    other = Archive(store)
    other.hide(chat_id)
    other.finish_deletion(chat_id)
    says(chat, "still here")
    archive.save(chat, "demo")
    assert not archive.branched
    assert store.load(chat_id).messages == chat.messages


def test_unreadable_chat_file_is_not_overwritten(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    archive = Archive(store)
    chat = OpenChat()
    says(chat, "hello")
    archive.save(chat, "demo")
    path = tmp_path / f"{chat.id}.json"
    theirs = path.read_text().replace('"version": 2', '"version": 7')
    path.write_text(theirs)
    says(chat, "mine")
    archive.save(chat, "demo")
    assert archive.branched
    assert path.read_text() == theirs
    assert store.load(chat.id).messages == chat.messages


def test_two_programs_that_save_at_once_lose_no_turn(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    for turn in range(8):
        begun = OpenChat()
        says(begun, "hello")
        Archive(store).save(begun, "demo")
        both = Barrier(2)

        def go_on(
            name: str, chat_id: str = begun.id, turn: int = turn, both: Barrier = both
        ) -> tuple[str, OpenChat]:
            archive = Archive(store)
            chat = opened(archive, chat_id)
            says(chat, f"{name} {turn}")
            both.wait()
            archive.save(chat, "demo")
            return chat.id, chat

        with ThreadPoolExecutor(2) as threads:
            saved = list(threads.map(go_on, ("mine", "theirs")))
        for chat_id, chat in saved:
            assert store.load(chat_id).messages == chat.messages


def test_a_chat_that_could_not_be_saved_is_saved_later_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChatStore(tmp_path)
    archive = Archive(store)
    first, second = OpenChat(), OpenChat()
    says(first, "hello")
    fails_to_save(archive, first, monkeypatch)
    says(second, "bye")
    archive.save(second, "demo")
    assert sorted(chat.title for chat in store.list()) == ["bye", "hello"]
    archive.check_saved()


@pytest.mark.parametrize("change", ["rename", "delete and restore"])
def test_changing_an_unsaved_chat_loses_no_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    store = ChatStore(tmp_path)
    archive = Archive(store)
    chat, other = OpenChat(), OpenChat()
    says(chat, "hello")
    archive.save(chat, "demo")
    says(chat, "unsaved")
    fails_to_save(archive, chat, monkeypatch)
    if change == "rename":
        archive.change(chat.id, title="another title", pinned=True)
        assert store.list()[0].title == "another title"
        assert store.list()[0].pinned
    else:
        archive.hide(chat.id)
        # Saving another chat does not bring the deleted one back.
        says(other, "bye")
        archive.save(other, "demo")
        assert [each.title for each in store.list()] == ["bye"]
        archive.check_saved()
        archive.restore()
    assert store.load(chat.id).messages == chat.messages
    assert not archive.branched
    archive.check_saved()


def test_a_chat_that_is_deleted_for_good_is_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    store = ChatStore(tmp_path)
    archive = Archive(store)
    chat, other = OpenChat(), OpenChat()
    says(chat, "hello")
    archive.save(chat, "demo")
    fails_to_save(archive, chat, monkeypatch)
    archive.hide(chat.id)
    archive.finish_deletion(chat.id)
    says(other, "bye")
    archive.save(other, "demo")
    assert [each.title for each in store.list()] == ["bye"]


def test_images_count_towards_the_size_of_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.tui.archive.MAX_CHAT_BYTES", 1000)
    archive, chat = Archive(ChatStore(tmp_path)), OpenChat()
    image = Image("photo.png", bytes(900), 1, 1, "PNG", 1)
    turn = chat.send(Message("user", "?", files=(AttachedFile("photo.png", "", 1, image),)))
    with raises(OptionError, "the maximum for a chat", code="chat_too_large"):
        archive.check_size(chat, turn)


def test_the_size_of_a_message_is_counted_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.tui.archive.MAX_CHAT_BYTES", 1000)
    archive, chat = Archive(ChatStore(tmp_path)), OpenChat()
    with raises(OptionError, "the maximum for a chat", code="chat_too_large"):
        archive.check_size(chat, chat.send(Message("user", "語" * 400)))
    with raises(OptionError, "the maximum for a chat", code="chat_too_large"):
        archive.check_size(chat, chat.send(Message("user", "\n" * 600)))
    archive.check_size(chat, chat.send(Message("user", "x" * 900)))


@pytest.mark.long
async def test_a_chat_that_is_too_long_takes_no_further_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first")
        (path,) = d.saved()
        monkeypatch.setattr("edgespec.tui.archive.MAX_CHAT_BYTES", path.stat().st_size + 100)
        await d.say("x" * 101)
        await d.said("the maximum for a chat. Type /new to start an empty chat")
        assert d.chat.prompt.text == "x" * 101
        assert len(d.chat.current_chat.entries) == 2
        await d.say("second")
        assert len(d.chat.current_chat.entries) == 4
        await d.press("ctrl+r")
        await d.said("the maximum for a chat.")
        d.chat.prompt.clear()
        await d.say("/new")
        await d.say("third")
        assert len(d.saved()) == 2


async def two_chats(folder: Path) -> list[str]:
    """Their ids, the newest first."""
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(text="Two.")])
    async with driving(loading(runtime), folder) as d:
        await d.say("About apples")
        await d.press("ctrl+n")
        await d.say("About pears")
        return [path.stem for path in sorted(d.saved(), key=lambda path: -path.stat().st_mtime_ns)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "shown"), [("last", "About pears"), ("apples", "About apples"), ("ID", "About apples")]
)
async def test_resume_opens_the_chosen_chat(wanted: str, shown: str, tmp_path: Path) -> None:
    _, oldest = await two_chats(tmp_path)
    resume = oldest if wanted == "ID" else wanted
    runtime = ScriptedRuntime(scripts=[Script(text="More.")])
    async with driving(loading(runtime), tmp_path, resume=resume) as d:
        await d.said(shown)
        await d.say("Go on")
        assert len(d.saved()) == 2
        assert len(d.chat.current_chat.entries) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "says"), [("last", "There are no saved chats yet"), ("plums", "no saved chat 'plums'")]
)
async def test_resume_without_a_match_starts_a_new_chat(wanted: str, says: str, tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, resume=wanted) as d:
        await d.said(says)
        assert d.chat.current_chat.entries == []


async def test_memory_command_shows_the_reused_tokens(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.send("/memory")
        await d.said("(12,345 tokens reused)")
        assert "3 prompts" in d.transcript()


@pytest.mark.long
async def test_resumed_chat_reuses_its_cache_until_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the demo model. Deleting the chat also deletes its cached prefix."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))

    def load(progress: object) -> edgespec.Runtime:
        assert progress
        return edgespec.load("demo", "none", method="none", prefix_cache="disk", threads=1, context=512)

    settings: dict[str, str | int | float | bool | list[str]] = {"max_tokens": 24, "seed": 1}
    async with driving(load, tmp_path, settings=settings, system="Be brief.") as d:
        await d.say("How do I list files by size?")
        first = d.chat.stats
    assert list(data_folder().rglob("*.kept"))
    async with driving(load, tmp_path, settings=settings, resume="last") as d:
        await d.said("How do I list files by size?")
        await d.say("And by name?")
        again = d.chat.stats
        assert first
        assert again
        assert again.cached_prompt_tokens >= first.prompt_tokens
        chat_id = d.chat.current_chat.id
        d.chat.archive.hide(chat_id)
        d.chat.archive.finish_deletion(chat_id)
    assert not list(data_folder().rglob("*.kept"))


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
