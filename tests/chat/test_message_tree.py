"""No operation on message trees loses a message, and saving and loading changes nothing."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore

NOON = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)
OPERATIONS = ("send", "edit", "regenerate", "continue", "switch", "delete", "undo", "prune")


def apply(tree: MessageTree[str], operation: str, pick: int, text: str) -> MessageTree[str]:
    """Apply an operation of the chat to one of the open messages. `pick` chooses the message."""
    place = tree.path[pick % len(tree.path)] if tree.path else None
    if operation == "send" or place is None:
        return tree.add(text, tree.tip)
    if operation in ("edit", "regenerate"):
        return tree.add(text, tree.parents[place])
    if operation == "continue":
        return tree.with_message(place, tree.messages[place] + text)
    if operation == "switch":
        versions = tree.versions(place)
        return tree.opened(versions[pick % len(versions)])
    if operation == "delete":
        return tree.without(place)
    if operation == "undo":
        return tree.restored() if tree.deleted else tree
    return tree.pruned()


steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.text("ab", max_size=2)))


def grown(operations: list[tuple[str, int, str]]) -> MessageTree[str]:
    tree: MessageTree[str] = MessageTree()
    for operation in operations:
        tree = apply(tree, *operation)
    return tree


@given(steps, st.tuples(st.sampled_from(OPERATIONS[:-1]), st.integers(0, 99), st.text("ab", max_size=2)))
def test_no_operation_loses_a_message(
    operations: list[tuple[str, int, str]], last: tuple[str, int, str]
) -> None:
    before = grown(operations)
    after = apply(before, *last)
    assert len(after.messages) >= len(before.messages)
    assert after.parents[: len(before.parents)] == before.parents
    for old, new in zip(before.messages, after.messages, strict=False):
        assert new.startswith(old)


@given(steps)
def test_the_open_path_leads_from_a_first_message_to_the_tip_without_deleted_ones(
    operations: list[tuple[str, int, str]],
) -> None:
    tree = grown(operations)
    assert [tree.parents[place] for place in tree.path] == [None, *tree.path][: len(tree.path)]
    assert not set(tree.path) & set(tree.deleted)
    for place in tree.path:
        assert place in tree.versions(place)
    assert (tree.tip is None) == (not tree.pruned().messages)


@given(steps, st.integers(0, 99))
def test_undo_restores_what_was_deleted(operations: list[tuple[str, int, str]], pick: int) -> None:
    tree = grown([*operations, ("send", 0, "a")])
    deleted = tree.path[pick % len(tree.path)]
    restored = tree.without(deleted).restored()
    assert deleted in restored.path
    assert restored.opened(deleted) == tree.opened(deleted)
    assert len(restored.pruned().messages) == len(tree.pruned().messages)


@given(steps)
def test_pruning_removes_only_deleted_messages_and_what_follows_them(
    operations: list[tuple[str, int, str]],
) -> None:
    tree = grown(operations)
    pruned = tree.pruned()
    assert pruned.open_messages == tree.open_messages
    assert [len(pruned.versions(place)) for place in pruned.path] == [
        len(tree.versions(place)) for place in tree.path
    ]
    assert pruned.pruned() == pruned


@pytest.mark.long
@given(steps)
def test_saving_and_loading_changes_nothing(operations: list[tuple[str, int, str]]) -> None:
    tree = grown(operations).pruned().map(lambda text: Message("user", text))
    chat = SavedChat("one", tree, NOON, NOON, title="Letters")
    with tempfile.TemporaryDirectory() as folder:
        store = ChatStore(Path(folder))
        store.save(chat)
        assert store.load("one") == chat


def test_switching_versions_follows_the_newest_messages() -> None:
    tree = MessageTree.linear(["question", "one", "more"]).add("two", 0).add("even more", 3)
    assert tree.open_messages == ("question", "two", "even more")
    assert tree.versions(3) == (1, 3)
    assert tree.opened(1).open_messages == ("question", "one", "more")
    assert tree.without(3).open_messages == ("question", "one", "more")
    assert tree.without(0).open_messages == ()
    assert MessageTree().path == ()
