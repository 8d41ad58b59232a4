"""Saved chats: round trips, and damaged files."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.chat.message import AttachedFile, Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat, Setting, title_of
from edgespec.chat.store import ChatStore, _entry
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ChatFileError
from edgespec.model.image import Image
from tests.backends.tiny_vision import picture, png_bytes
from tests.raising import raises

NOON = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)
TALK = (Message("user", "How do I list files?"), Message("assistant", "Use `ls`.\n\n```sh\nls -S\n```"))


def chat(
    chat_id: str = "one", *, updated: datetime = NOON, messages: tuple[Message, ...] = TALK
) -> SavedChat:
    return SavedChat(
        chat_id,
        MessageTree.linear(messages),
        NOON,
        updated,
        target="demo",
        sampling={"temperature": 0.5, "top_k": 20},
    )


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    return ChatStore(tmp_path / "chats")


def test_a_saved_chat_comes_back_whole(store: ChatStore) -> None:
    saved = SavedChat(
        "one",
        MessageTree.linear(TALK),
        NOON,
        NOON,
        title="Files",
        target="demo",
        system="Be brief.",
        sampling={"stop": ["a", "b"]},
    )
    store.save(saved)
    assert store.load("one") == saved


def test_images_are_read_only_when_a_chat_is_opened(
    store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = AttachedFile("photo.png", "", 3, Image.read(png_bytes(picture(4, 4)), "photo.png"))
    messages = (Message("user", "What is this?", files=(photo,)), Message("assistant", "A photo."))
    read: list[str] = []
    from_base64 = Image.from_base64

    def counted(text: str, name: str = "") -> Image:
        read.append(name)
        return from_base64(text, name)

    monkeypatch.setattr(Image, "from_base64", counted)
    saved = store.save_after(chat(messages=messages), None)
    for minute in range(1, 4):
        changed = replace(saved, updated=NOON + timedelta(minutes=minute))
        saved = store.save_after(changed, saved.updated)
    # Another program has not read the file yet, and changes it too.
    other = ChatStore(store.folder)
    (found,) = other.list()
    assert found.text == "What is this?\nphoto.png\n\nA photo."
    theirs = other.save_after(replace(saved, title="Theirs", updated=NOON), saved.updated)
    assert not read
    assert theirs.id == "one"
    assert store.save_after(replace(saved, title="Mine"), saved.updated).id != "one"
    assert store.load("one").messages == messages
    assert read == ["photo.png"]


def test_load_options_come_back(store: ChatStore) -> None:
    options: dict[str, Setting] = {"context": 768, "kv_type": "q8_0", "experts": "cpu"}
    saved = replace(chat(), models=ModelReferences("demo", "none", options))
    store.save(saved)
    assert store.load("one").models == saved.models


@pytest.mark.parametrize("options", [[], {"context": None}, {"context": {}}])
def test_damaged_load_options_are_reported(store: ChatStore, options: object) -> None:
    path = store.save(replace(chat(), models=ModelReferences("demo")))
    data = json.loads(path.read_text())
    data["models"]["options"] = options
    path.write_text(json.dumps(data))
    with raises(ChatFileError, code="chat_file_damaged"):
        store.load("one")


def test_the_file_is_versioned_json_for_its_owner_only(store: ChatStore) -> None:
    path = store.save(chat())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = json.loads(path.read_text("utf-8"))
    assert data["version"] == 2
    assert data["messages"][0] == {"role": "user", "content": "How do I list files?"}
    assert list(data) == [
        "version", "id", "title", "created", "updated", "target", "system", "messages", "open",
        "sampling",
    ]  # fmt: skip


def test_a_file_of_format_version_1_opens_unchanged(store: ChatStore) -> None:
    data = chat().to_json()
    del data["open"]
    store.folder.mkdir()
    path = store.folder / "one.json"
    path.write_text(json.dumps(data | {"version": 1}), "utf-8")
    assert store.load("one") == replace(chat(), title="How do I list files?")
    assert json.loads(path.read_text("utf-8"))["version"] == 1


def test_versions_of_messages_are_saved_with_their_parents(store: ChatStore) -> None:
    tree = MessageTree.linear(TALK)
    tree = tree.add(Message("assistant", "Use `find`."), 0).add(Message("user", "Another question"), None)
    tree = tree.add(Message("assistant", "An answer"), 3).opened(1)
    saved = SavedChat("one", tree, NOON, NOON, title="Files")
    path = store.save(saved)
    assert store.load("one") == saved
    assert store.load("one").messages == TALK
    data = json.loads(path.read_text("utf-8"))
    assert data["open"] == 1
    assert [message.get("parent", "adjacent") for message in data["messages"]] == [
        "adjacent", "adjacent", 0, None, "adjacent",
    ]  # fmt: skip


@pytest.mark.parametrize("veto", ["refused", "stopped"])
def test_whether_the_user_prevented_a_call_comes_back(store: ChatStore, veto: str) -> None:
    result = Message("tool", "any text", tool_call_id="1", name="look", ended_early=veto)
    store.save(chat(messages=(*TALK, result)))
    (*_, loaded) = store.load("one").messages
    assert loaded.ended_early == veto


def test_the_time_of_the_reasoning_comes_back(store: ChatStore) -> None:
    reply = Message("assistant", "Yes.", "Hm.", reasoning_seconds=1.23456)
    path = store.save(chat(messages=(TALK[0], reply)))
    assert store.load("one").messages[1].reasoning_seconds == 1.23456
    text = path.read_text("utf-8")
    for bad in ("-1", "true", '"1"', "Infinity", "NaN", "1" + "0" * 400):
        path.write_text(text.replace("1.23456", bad), "utf-8")
        with raises(ChatFileError, "message 2"):
            store.load("one")


def test_a_chat_that_could_not_be_read_again_is_not_written(
    store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(chat())
    before = path.read_bytes()
    monkeypatch.setattr("edgespec.chat.saved_chat.MAX_SAVED_BYTES", len(before) + 100)
    assert store.load("one").messages == TALK
    with raises(ChatFileError, code="chat_too_large"):
        store.save(chat(messages=(*TALK, Message("user", "x" * 101))))
    assert path.read_bytes() == before


CALL = ToolCall("c1", "now", "{}")


def test_tool_calls_and_their_results_come_back(store: ChatStore) -> None:
    messages = (
        Message("user", "What time is it?"),
        Message(
            "assistant", "Let me see.", "The user", ("<think>", "</think>"), (ToolCall("c1", "now", "{}"),)
        ),
        Message("tool", "12:00", tool_call_id="c1", name="now"),
        Message("assistant", "", tool_calls=(ToolCall("c2", "later", '{"seconds": 3}'),)),
    )
    store.save(chat(messages=messages))
    assert store.load("one").messages == messages


def test_reasoning_is_an_optional_key_of_a_message(store: ChatStore) -> None:
    messages = (*TALK, Message("user", "More?"), Message("assistant", "Yes.", "Hm.", ("<think>", "</think>")))
    path = store.save(chat(messages=messages))
    loaded = store.load("one").messages
    assert (loaded, loaded[3].text) == (messages, "<think>Hm.</think>Yes.")
    data = json.loads(path.read_text("utf-8"))
    assert data["version"] == 2
    assert data["messages"][1] == {"role": "assistant", "content": TALK[1].content}
    assert data["messages"][3] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning": "Hm.",
        "markers": ["<think>", "</think>"],
    }


def test_reasoning_in_the_content_of_an_older_file_is_separated(store: ChatStore) -> None:
    path = store.save(chat())
    data = json.loads(path.read_text("utf-8"))
    data["messages"][1]["content"] = "<think>\nHm.\n</think>\n\nYes."
    data["messages"][0]["content"] = "<think>Why?</think>"
    path.write_text(json.dumps(data), "utf-8")
    question, reply = store.load("one").messages
    assert (question.content, question.reasoning) == ("<think>Why?</think>", "")
    assert (reply.content, reply.reasoning, reply.text) == ("Yes.", "Hm.", data["messages"][1]["content"])


def test_markers_around_empty_reasoning_are_kept(store: ChatStore) -> None:
    message = Message("assistant", "Yes.", markers=("<think>\n\n</think>\n\n", ""))
    store.save(chat(messages=(TALK[0], message)))
    assert store.load("one").messages[1].text == message.text


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("reasoning", ["a"], "message 2"),
        ("markers", "ab", "message 2"),
        ("markers", ["a", 1], "message 2"),
    ],
)
def test_damaged_reasoning_is_reported(store: ChatStore, key: str, value: object, error: str) -> None:
    path = store.save(chat())
    data = json.loads(path.read_text("utf-8"))
    data["messages"][1][key] = value
    path.write_text(json.dumps(data), "utf-8")
    with raises(ChatFileError, error):
        store.load("one")


@pytest.mark.parametrize(
    "text", ["日本語 और हिन्दी", "👩‍👩‍👧 é\u0301", "\u202e right to left", "nul \x00 tab \t", "\ud83d"]
)
def test_any_text_survives(store: ChatStore, text: str) -> None:
    store.save(chat(messages=(Message("user", text),)))
    expected = text.encode("utf-8", "replace").decode("utf-8")
    assert store.load("one").messages == (Message("user", expected),)


def test_the_newest_chat_is_listed_first(store: ChatStore) -> None:
    for hours, name in ((2, "middle"), (1, "old"), (3, "new")):
        store.save(chat(name, updated=NOON + timedelta(hours=hours)))
    assert [entry.id for entry in store.list()] == ["new", "middle", "old"]
    assert [entry.message_count for entry in store.list()] == [2, 2, 2]


def test_no_folder_means_no_chats(store: ChatStore) -> None:
    assert store.list() == []


def test_ids_are_unique(store: ChatStore) -> None:
    assert len({store.new_id() for _ in range(500)}) == 500


@pytest.mark.parametrize("chat_id", ["", "../other", "a/b", ".hidden", "a" * 65, "a.b", "a\n"])
def test_an_id_cannot_name_another_folder(store: ChatStore, chat_id: str) -> None:
    with raises(ChatFileError, code="chat_not_found"):
        store.load(chat_id)


def _with(**changes: object) -> str:
    return json.dumps({**chat().to_json(), **changes})


BROKEN = {
    "truncated": (_with()[:-40], "valid JSON"),
    "empty": ("", "valid JSON"),
    "a list": ("[]", "a list"),
    "no version": (_with(version=None), "missing"),
    "a newer version": (_with(version=7), "version 7"),
    "a boolean version": (_with(version=True), "true or"),
    "messages as text": (_with(messages="hello"), "`messages`"),
    "a message as text": (_with(messages=["hello"]), "message 1"),
    "an unknown role": (_with(messages=[{"role": "robot", "content": ""}]), "'robot'"),
    "a list as role": (_with(messages=[{"role": [], "content": ""}]), "[]"),
    "content as a number": (
        _with(messages=[{"role": "user", "content": 3}]),
        "not int",
    ),
    "a parent that comes later": (
        _with(messages=[{"role": "user", "content": "", "parent": 0}], open=None),
        "`parent`",
    ),
    "an open message that is missing": (_with(open=2), "`open`"),
    "a parent as text": (
        _with(messages=[{"role": "user", "content": "", "parent": "one"}]),
        "`parent`",
    ),
    "a system prompt as a number": (_with(system=3), "`system`"),
    "a title as a list": (_with(title=[]), "`title`"),
    "no time": (_with(updated="yesterday"), "'yesterday'"),
    "an impossible time": (_with(updated="0001-01-01T00:00:00+23:00"), "ISO 8601"),
    "a time in the last year": (
        _with(updated="9999-12-31T23:59:59.999999+00:00"),
        "ISO 8601",
    ),
    "another id": (_with(id="other"), "file name"),
    "sampling as a list": (_with(sampling=[]), "`sampling`"),
    "a setting as an object": (_with(sampling={"top_k": {}}), "'top_k'"),
    "a setting that is not a number": (_with().replace("0.5", "NaN"), "'temperature'"),
    "deep nesting": ("[" * 200_000, "JSON"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_listed_with_its_reason_and_kept(store: ChatStore, text: str, message: str) -> None:
    store.save(chat("good", updated=NOON))
    path = store.folder / "one.json"
    path.write_text(text, "utf-8")
    code = "chat_version_unknown" if message == "version 7" else ""
    with raises(ChatFileError, message, code=code) as caught:
        store.load("one")
    assert "\n" not in str(caught.value)
    assert caught.value.next_step
    problems = {entry.id: entry.problem for entry in store.list()}
    assert problems["good"] == ""
    assert problems["one"] == caught.value.what
    assert path.read_text("utf-8") == text


def test_a_broken_file_of_a_far_year_is_listed(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems accept any time."""
    store.folder.mkdir()
    (store.folder / "one.json").write_text("broken")
    far = SimpleNamespace(st_mtime=9e11, st_mode=stat.S_IFREG, st_size=6)
    monkeypatch.setattr(Path, "stat", lambda _path: far)
    assert _entry(store.folder / "one.json").updated.year == 1970


def test_invalid_utf8_is_a_broken_chat(store: ChatStore) -> None:
    store.folder.mkdir()
    (store.folder / "one.json").write_bytes(b"\xff\xfe{}")
    with raises(ChatFileError, "not UTF-8"):
        store.load("one")


def test_missing_chat_raises(store: ChatStore) -> None:
    with raises(ChatFileError, code="chat_not_found"):
        store.load("gone")


def test_a_folder_in_the_place_of_a_chat_is_listed_as_broken(store: ChatStore) -> None:
    (store.folder / "one.json").mkdir(parents=True)
    assert store.list()[0].problem


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX")
def test_named_pipe_is_listed_as_broken_without_blocking(store: ChatStore) -> None:
    store.folder.mkdir(parents=True)
    os.mkfifo(store.folder / "pipe.json")
    assert ["pipe.json" in chat.problem for chat in store.list()] == [True]


def test_a_failed_save_keeps_the_older_version(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(chat())

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with raises(ChatFileError, "space on", code="file_not_written"):
        store.save(chat(messages=(*TALK, Message("user", "more"))))
    assert store.load("one").messages == TALK
    assert [path.name for path in store.folder.iterdir()] == ["one.json"]


def test_folder_that_cannot_be_created_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ChatStore(tmp_path / "file" / "chats")
    with raises(ChatFileError, "EDGESPEC_DATA_DIR", code="file_not_written"):
        store.save(chat())
    with raises(ChatFileError, "EDGESPEC_DATA_DIR", code="chat_file_unreadable"):
        store.list()


def test_delete_ignores_a_missing_chat(store: ChatStore) -> None:
    store.save(chat("one"))
    store.save(chat("two"))
    store.delete("one")
    store.delete("one")
    assert [entry.id for entry in store.list()] == ["two"]


def test_the_title_comes_from_the_first_user_message() -> None:
    assert title_of(TALK) == "How do I list files?"
    assert title_of(()) == "New chat"
    assert title_of((Message("user", "  \n "),)) == "New chat"
    assert title_of((Message("user", "one\ntwo   three"),)) == "one two three"
    long = title_of((Message("user", "word " * 40),))
    assert long.endswith("word…")
    assert len(long) <= 60
    assert len(title_of((Message("user", "x" * 200),))) == 60


def test_chats_are_in_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    assert ChatStore().folder == tmp_path / "chats"


def test_stale_temporary_files_are_deleted(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    old, new = tmp_path / ".one.json.abc.tmp", tmp_path / ".two.json.def.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    now = datetime.now(UTC)
    store.save(SavedChat("a", MessageTree(), now, now))
    assert not old.exists()
    assert new.exists()
    assert [chat.id for chat in store.list()] == ["a"]


def test_a_file_in_place_of_the_folder_is_named(store: ChatStore) -> None:
    store.folder.write_text("a file")
    with raises(ChatFileError, "chats is", code="file_not_written"):
        store.save(chat())
