"""Only new parts of prompts are saved, before their replies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgespec.methods.suffix.saved_replies import delete_saved_replies
from tests.methods.suffix.conftest import SIZE, fill, kept, store


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(SIZE), k=count)


def test_a_chat_is_saved_turn_by_turn(folder: Path) -> None:
    chat: list[int] = []
    first = store(folder)
    for turn in range(5):
        chat += words(turn, 30)
        reply = words(100 + turn, 5)
        assert first.add(reply, chat) == [[*chat[-30:], *reply]]
        chat += reply
    assert [token for text in kept(folder) for token in text] == chat


def test_a_resumed_chat_is_not_saved_again(folder: Path) -> None:
    chat = []
    first = store(folder)
    for turn in range(6):
        chat += words(turn, 12)
        reply = words(100 + turn, 9)
        first.add(reply, chat)
        chat += reply
    again = store(folder)
    again.load()
    (text,) = again.add([1, 2], [*chat, 3, 4, 5])
    assert text[-5:] == [3, 4, 5, 1, 2]
    assert len(text) < 5 + 8


def test_a_common_beginning_of_chats_is_saved_once(folder: Path) -> None:
    system = words(0, 200)
    for number in range(1, 5):
        one = store(folder)
        one.load()
        for turn in range(3):
            one.add(words(200 + number, 10), [*system, *words(10 * number + turn, 10)])
    assert len(kept(folder)) == 12
    assert sum(map(len, kept(folder))) < 200 + 12 * (20 + 8)


def test_new_text_before_known_text_is_saved_separately(folder: Path) -> None:
    one = store(folder)
    document = words(1, 200)
    one.add([1], document)
    before, reply = one.add([2, 3], [*words(2, 50), *document])
    assert before[:50] == words(2, 50)
    assert reply[-2:] == [2, 3]
    assert len(reply) < 2 + 8
    assert kept(folder)[1:] == [before, reply]


def test_a_very_long_prompt_is_saved_in_part(folder: Path) -> None:
    one = store(folder)
    fill(folder)
    one.add([1, 2], words(1, 2000))
    assert kept(folder)[:3] == [[1, 2, 3], [4, 5], [6]]
    assert kept(folder)[3] == [*words(1, 2000)[-250:], 1, 2]


@pytest.mark.parametrize("size", [3, 40])
def test_after_deletion_earlier_turns_are_not_saved_again(folder: Path, size: int) -> None:
    running = store(folder)
    chat = words(1, size)
    running.add([1], chat)
    delete_saved_replies(folder)
    chat += [1, *words(2, size)]
    assert running.add([2], chat) == []
    chat += [2, *words(3, size)]
    assert running.add([3], chat) == [[*words(3, size), 3]]
    assert kept(folder) == [[*words(3, size), 3]]
