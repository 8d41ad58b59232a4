"""Searching the titles and messages of saved chats."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.chat.message import AttachedFile, Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore, search

NOON = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    store = ChatStore(tmp_path)
    reply = Message("assistant", "Pines:\n\nUp to 80 METRES.")
    tree = MessageTree.linear([Message("user", "How tall?"), reply])
    tree = tree.add(Message("assistant", "An older version: oaks"), 0).opened(1)
    store.save(SavedChat("trees", tree, NOON, NOON, title="Trees"))
    store.save(SavedChat("files", MessageTree.linear([Message("user", "ls")]), NOON, NOON, pinned=True))
    return store


@pytest.mark.parametrize(
    ("query", "ids", "line"),
    [
        ("", {"trees", "files"}, ""),
        ("TREE", {"trees"}, ""),
        ("metres", {"trees"}, "Up to 80 METRES."),
        ("trees metres", {"trees"}, "Up to 80 METRES."),
        ("oaks", {"trees"}, "…older version: oaks"),
        ("metres files", set(), ""),
    ],
)
def test_all_words_must_occur_in_the_title_or_the_messages(
    store: ChatStore, query: str, ids: set[str], line: str
) -> None:
    found = search(store.list(), query)
    assert {each.chat.id for each in found} == ids
    assert [each.line for each in found][:1] == ([line] if found else [])


def test_a_changed_file_is_read_again(store: ChatStore) -> None:
    assert [chat.pinned for chat in store.list() if chat.id == "files"] == [True]
    tree = MessageTree.linear([Message("user", "another text")])
    store.save(SavedChat("files", tree, NOON, NOON))
    assert [each.chat.id for each in search(store.list(), "another")] == ["files"]
    store.delete("files")
    assert not search(store.list(), "another")


def test_the_text_and_names_of_attached_files_are_found(store: ChatStore) -> None:
    files = (AttachedFile("notes/harbour.md", "first line\nThe LIGHTHOUSE is white."),)
    tree = MessageTree.linear([Message("user", "Summarise", files=files)])
    store.save(SavedChat("attached", tree, NOON, NOON))
    (found,) = search(store.list(), "lighthouse white")
    assert (found.chat.id, found.line) == ("attached", "The LIGHTHOUSE is white.")
    assert [each.chat.id for each in search(store.list(), "harbour")] == ["attached"]
