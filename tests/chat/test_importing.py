"""Importing chats from ChatGPT, Claude, Open WebUI and edgespec, and errors for invalid files."""

from __future__ import annotations

import io
import json
import resource
import tempfile
import zipfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat import importing as module
from edgespec.chat.exporting import (
    FORMATS,
    as_html,
    as_json,
    as_markdown,
    messages_as_markdown,
    write_export,
)
from edgespec.chat.importing import ExportedChats, ItemTooLargeError, json_items
from edgespec.chat.message import AttachedFile, Message
from edgespec.chat.saved_chat import MAX_CHAT_BYTES, MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ChatFileError, OptionError
from tests.raising import raises

NOON = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)


def imported(folder: Path, value: object) -> ExportedChats:
    path = folder / "conversations.json"
    path.write_text(json.dumps(value), "utf-8")
    return ExportedChats(path)


def contents(chat: SavedChat) -> list[str]:
    return [message.content for message in chat.messages]


def chatgpt_node(key: str, parent: str | None, role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": list(parts)}
    message = {"id": key, "author": {"role": role}, "content": content, "metadata": {}, "recipient": "all"}
    return {"id": key, "parent": parent, "children": [], "message": message | more}


CHATGPT = {
    "title": "Sorting files",
    "create_time": 1740830400.5,
    "update_time": 1740830460.0,
    "current_node": "a1",
    "mapping": {
        "a1": chatgpt_node("a1", "hidden", "assistant", "Use `ls -S`."),
        "root": {"id": "root", "message": None, "parent": None, "children": ["system"]},
        "system": chatgpt_node("system", "root", "system", ""),
        "q": chatgpt_node("q", "system", "user", {"content_type": "image_asset_pointer"}, "How?"),
        "hidden": chatgpt_node(
            "hidden", "q", "assistant", "secret", metadata={"is_visually_hidden_from_conversation": True}
        ),
        "tool": chatgpt_node("tool", "q", "tool", "result"),
        "a2": chatgpt_node("a2", "tool", "assistant", "Use `du`."),
    },
}


def test_chats_without_messages_are_left_out(tmp_path: Path) -> None:
    message = {"uuid": "1", "sender": "human", "text": "Q"}
    empty = {"name": "", "chat_messages": []}
    result = imported(tmp_path, [empty, {"name": "T", "chat_messages": [message]}, empty])
    assert [chat.title for chat in result] == ["T"]
    assert +result.left_out == {"chats without messages": 2}
    result = imported(tmp_path, [empty])
    assert [*result] == []
    assert +result.left_out == {"chats without messages": 1}


@pytest.mark.long
def test_a_chat_with_photos_is_imported_again(tmp_path: Path) -> None:
    text = "x" * (MAX_CHAT_BYTES + 1)
    path = tmp_path / "chat.json"
    path.write_text(as_json(SavedChat("", MessageTree.linear([Message("user", text)]), NOON, NOON)))
    (chat,) = ExportedChats(path)
    assert len(chat.messages[0].content) == len(text)


def test_chats_of_chatgpt_keep_their_versions(tmp_path: Path) -> None:
    result = imported(tmp_path, [CHATGPT])
    (chat,) = result
    assert contents(chat) == ["How?", "Use `ls -S`."]
    assert len(chat.tree.versions(chat.tree.path[1])) == 2
    assert chat.title == "Sorting files"
    assert chat.created == datetime.fromtimestamp(1740830400.5, UTC)
    assert +result.left_out == {"images, audio and video": 1, "reasoning, tool calls and their results": 1}


CLAUDE = {
    "uuid": "c",
    "name": "Trees",
    "created_at": "2025-03-01T12:00:00.123456Z",
    "updated_at": "2025-03-01T12:01:00Z",
    "chat_messages": [
        {
            "uuid": "1",
            "sender": "human",
            "text": "How tall?",
            "content": [{"type": "text", "text": "How tall?"}],
            "attachments": [{"file_name": "a.txt", "extracted_content": "A tree."}],
            "files": [{"file_name": "b.png"}],
        },
        {
            "uuid": "2",
            "sender": "assistant",
            "text": "",
            "content": [
                {"type": "thinking", "thinking": "Trees are tall."},
                {"type": "tool_use", "name": "web"},
                {"type": "text", "text": "115 m."},
            ],
        },
    ],
}


def test_chats_of_claude_keep_reasoning_and_pasted_texts(tmp_path: Path) -> None:
    result = imported(tmp_path, [CLAUDE])
    (chat,) = result
    assert contents(chat) == ["How tall?\n\nA tree.", "115 m."]
    assert chat.messages[1].reasoning == "Trees are tall."
    assert +result.left_out == {"reasoning, tool calls and their results": 1, "attached files": 1}


def test_versions_in_chats_of_claude_are_kept(tmp_path: Path) -> None:
    root = "00000000-0000-4000-8000-000000000000"
    messages = [
        {"uuid": "q", "parent_message_uuid": root, "sender": "human", "text": "Q"},
        {"uuid": "a", "parent_message_uuid": "q", "sender": "assistant", "text": "A"},
        {"uuid": "b", "parent_message_uuid": "q", "sender": "assistant", "text": "B"},
    ]
    chat = CLAUDE | {"chat_messages": messages, "current_leaf_message_uuid": "a"}
    (result,) = imported(tmp_path, [chat])
    assert contents(result) == ["Q", "A"]
    assert len(result.tree.versions(1)) == 2


def test_chats_of_open_webui_keep_their_versions(tmp_path: Path) -> None:
    messages = {
        "b": {"id": "b", "parentId": "q", "childrenIds": [], "role": "assistant", "content": "B"},
        "q": {"id": "q", "parentId": None, "childrenIds": ["a", "b"], "role": "user", "content": "Q"},
        "a": {"id": "a", "parentId": "q", "childrenIds": [], "role": "assistant", "content": "A"},
    }
    chat = {"title": "T", "history": {"messages": messages, "currentId": "a"}, "messages": []}
    (result,) = imported(tmp_path, [{"id": "x", "title": "T", "chat": chat, "created_at": 1740830400}])
    assert contents(result) == ["Q", "A"]
    assert len(result.tree.versions(result.tree.path[1])) == 2


def test_a_chat_exported_as_json_is_imported_unchanged(tmp_path: Path) -> None:
    tree = MessageTree.linear([Message("user", "Q"), Message("assistant", "A")])
    tree = tree.add(Message("assistant", "B"), 0).opened(1)
    chat = SavedChat("", tree, NOON, NOON, title="T", system="Be brief.", sampling={"seed": 3})
    path = tmp_path / "chat.json"
    path.write_text(as_json(chat), "utf-8")
    assert list(ExportedChats(path)) == [chat]


def test_a_zip_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("conversations.json", json.dumps([CHATGPT, CLAUDE]))
    assert [chat.title for chat in ExportedChats(path)] == ["Sorting files", "Trees"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.json", "[]")
    with raises(ChatFileError, "contains no conversations.json", code="chat_file_unreadable"):
        list(ExportedChats(path))


def test_what_can_be_read_is_imported_from_a_file_with_damaged_chats(tmp_path: Path) -> None:
    result = imported(tmp_path, [{"title": "?"}, CHATGPT, 3])
    assert [chat.title for chat in result] == ["Sorting files"]
    assert result.left_out["chats that are damaged or in an unknown format"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "valid JSON"), ("[]", "no chats"), ("[" * 100_000, "valid JSON")],
)
def test_bad_files_are_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with raises(ChatFileError, message, code="wrong_file") as caught:
        list(ExportedChats(path))
    assert caught.value.next_step
    with raises(ChatFileError, code="chat_file_unreadable"):
        list(ExportedChats(tmp_path / "missing.json"))


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_zip_files_are_reported(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "chats.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("conversations.json", json.dumps([*range(1000)]))
    data = bytearray(path.read_bytes())
    data[70:90] = b"\xff" * 20
    path.write_bytes(data)
    with raises(ChatFileError, code="chat_file_unreadable"):
        list(ExportedChats(path))


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Yield each list and object in a JSON value, with one of its keys."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@pytest.mark.long
@given(st.sampled_from([CHATGPT, CLAUDE]), st.integers(0, 999), values)
def test_damage_never_raises_another_error(chat: dict[str, Any], pick: int, value: Any) -> None:
    damaged = json.loads(json.dumps(chat))
    every = places(damaged)
    container, key = every[pick % len(every)]
    container[key] = value
    with tempfile.TemporaryDirectory() as folder, suppress(ChatFileError):
        for read in imported(Path(folder), [damaged]):
            assert len(read.messages) <= len(read.tree.messages)


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", 253402300799, 1e400, "x"])
def test_a_chat_with_an_impossible_time_can_be_saved_and_read(time: object, tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    (chat,) = imported(tmp_path, [{**CHATGPT, "create_time": time, "update_time": time}])
    assert store.load(store.add(chat).id).updated.year == 1970


def test_exports_are_readable_and_html_runs_nothing() -> None:
    messages = [Message("user", "<b>Q</b>"), Message("assistant", "Use `ls` <script>alert(1)</script>")]
    chat = SavedChat("one", MessageTree.linear(messages), NOON, NOON, title="A & B", system="Be brief.")
    assert as_markdown(chat).startswith("# A & B\n\n**System:**\n\nBe brief.\n\n**You:**\n\n<b>Q</b>\n")
    page = as_html(chat)
    assert "<title>A &amp; B</title>" in page
    assert "&lt;b&gt;Q&lt;/b&gt;" in page
    assert "<code>ls</code>" in page
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert set(FORMATS) == {".md", ".json", ".html"}


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    chat = SavedChat("one", MessageTree.linear([Message("user", "Hello")]), NOON, NOON)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with raises(OptionError, "size limit", code="file_not_written"):
            write_export(chat, str(tmp_path / "chat.md"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())
    write_export(chat, str(tmp_path / "chat.md"))


def test_exports_name_attached_files_and_tools_and_contain_the_reasoning() -> None:
    messages = [
        Message("user", "Explain", files=(AttachedFile("a<b>.py", "x = 1"), AttachedFile("c`d.py", "y"))),
        Message(
            "assistant",
            "It sets x.",
            reasoning="First.\n\nThen </details>.",
            tool_calls=(ToolCall("1", "ls", '{"path":\n "<i>"}'),),
        ),
    ]
    chat = SavedChat("one", MessageTree.linear(messages), NOON, NOON, title="Files")
    assert as_markdown(chat) == (
        "# Files\n\n**You:**\n\nAttached files: `a<b>.py`, `` c`d.py ``\n\nExplain\n\n**Model:**\n\n"
        "> **Reasoning:**\n>\n> First.\n>\n> Then </details>.\n\nIt sets x.\n\n"
        'Called `ls` with `{"path": "<i>"}`\n'
    )
    assert "First." not in messages_as_markdown(chat.messages)
    page = as_html(chat)
    assert "<p>Attached files: <code>a&lt;b&gt;.py</code>, <code>c`d.py</code></p>" in page
    assert "<details><summary>Reasoning</summary><p>First.</p>\n<p>Then &lt;/details&gt;.</p>" in page
    assert "Called <code>ls</code> with <code>{&quot;path&quot;:" in page
    assert "<i>" not in page


def test_chatgpt_voice_chats_keep_what_was_said(tmp_path: Path) -> None:
    said = {"content_type": "audio_transcription", "text": "How tall?", "direction": "in"}
    recording = {"content_type": "real_time_user_audio_video_asset_pointer"}
    node = chatgpt_node("q", None, "user", said, recording)
    result = imported(tmp_path, [{"title": "T", "mapping": {"q": node}, "current_node": "q"}])
    (chat,) = result
    assert contents(chat) == ["How tall?"]
    assert result.left_out["images, audio and video"] == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.long
@given(st.lists(json_values), st.sampled_from([None, 2]))
def test_the_items_are_those_of_the_list(items: list[object], indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_CHARACTERS", 3)
        text = f" {json.dumps(items, indent=indent)}\n"
        assert list(json_items(io.StringIO(text), 10**9)) == items
        assert list(json_items(io.StringIO(json.dumps({"all": items})), 10**9)) == [{"all": items}]


@pytest.mark.parametrize("text", ["", " ", "[", "[1", "[1,", "[1,]", "[1 2]", "[1] 2", "{", '["', "]"])
def test_invalid_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(json_items(io.StringIO(text), 100))


def test_only_a_part_of_a_long_list_is_in_memory() -> None:
    stream = io.StringIO("[" + ",".join(['{"text": "%s"}' % ("x" * 1000)] * 5000) + "]")
    positions = [stream.tell() for _ in json_items(stream, 2000)]
    assert len(positions) == 5000
    assert positions[0] <= 1 << 20
    assert positions[2500] <= 3500 * 1016


def test_an_item_that_is_too_long_is_not_read_to_its_end() -> None:
    stream = io.StringIO(f'[{{"text": "{"x" * (1 << 24)}"}}]')
    with pytest.raises(ItemTooLargeError):
        list(json_items(stream, 1 << 20))
    assert stream.tell() <= 1 << 23
