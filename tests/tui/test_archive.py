"""Saved chats that two programs have open at the same time."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from edgespec.chat.message import AttachedFile, Message
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError, OptionError
from edgespec.model.image import Image
from edgespec.tui.archive import Archive
from edgespec.tui.open_chat import ChatEntry, OpenChat
from tests.raising import raises
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading


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
