"""The novelty filter returns all new parts of a text and few known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.suffix.indexes import TokenArray
from edgespec.methods.suffix.saved_replies import NoveltyFilter


def words(seed: int, count: int) -> TokenArray:
    """Return random tokens of a large vocabulary, without repeated parts."""
    return np.random.default_rng(seed).integers(0, 1 << 30, count).astype(np.int32)


def joined(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts)


def new(seen: NoveltyFilter, text: TokenArray) -> list[list[int]]:
    return [stretch.tolist() for stretch in seen.new_parts(text)]


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 200])
def test_at_first_everything_is_new(count: int) -> None:
    assert new(NoveltyFilter(), words(1, count)) == [words(1, count).tolist()]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_only_added_text_of_a_continued_chat_is_new(sizes: list[int]) -> None:
    seen = NoveltyFilter()
    chat = words(0, 0)
    for turn, size in enumerate(sizes):
        added = words(turn + 1, size)
        assert new(seen, joined(chat, added)) == [added.tolist()]
        chat = joined(chat, added)
        seen.add(chat)
        assert new(seen, chat) == [[]]


def test_a_system_prompt_of_another_chat_is_known() -> None:
    seen = NoveltyFilter()
    system, first, second = words(1, 150), words(2, 40), words(3, 40)
    seen.add(joined(system, first))
    (stretch,) = new(seen, joined(system, second))
    assert stretch[-40:] == second.tolist()
    assert len(stretch) < 40 + 8, "at most one stride of known text is returned again"


def test_removing_a_part_makes_little_text_new() -> None:
    seen = NoveltyFilter()
    known = words(1, 400)
    seen.add(known)
    assert sum(map(len, new(seen, joined(known[:203], known[245:])))) < 16


def test_an_inserted_part_is_new() -> None:
    seen = NoveltyFilter()
    known = words(1, 400)
    seen.add(known)
    between = words(2, 100)
    first, last = new(seen, joined(known[:200], between, known[200:]))
    at = first.index(int(between[0]))
    assert first[at : at + 100] == between.tolist()
    assert len(first) < 100 + 16
    assert last == []


def test_equal_tokens_in_another_order_are_new() -> None:
    seen = NoveltyFilter()
    text = words(1, 200)
    seen.add(text)
    assert new(seen, text[::-1]) == [text[::-1].tolist()]
    seen.add(np.zeros(100, np.int32))
    assert new(seen, np.ones(100, np.int32)) == [[1] * 100]


def test_memory_is_bounded_and_the_latest_text_stays_known() -> None:
    seen = NoveltyFilter(max_tokens=800)
    for seed in range(30):
        text = words(seed, 300)
        seen.add(text)
        assert new(seen, text) == [[]]
        assert seen._hashes.nbytes <= 800
