"""The suffix array finds every match length with all its occurrences."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_SAMPLED_OCCURRENCES
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixArray, SuffixRange
from tests.methods.exhaustive_search import Text, expected_matches, index_of, places, texts


def following(index: SuffixArray, where: SuffixRange) -> list[Text]:
    """Return the continuations of a range, up to the end of each text."""
    rows = index.continuations(where, MAX_CONTINUATION_TOKENS)
    return [[*row, SEPARATOR][: [*row, SEPARATOR].index(SEPARATOR)] for row in rows]


@settings(max_examples=60)
@given(st.lists(texts, max_size=5), texts)
def test_every_match_length_is_found_with_its_occurrences(documents: list[Text], text: Text) -> None:
    index = index_of(*documents)
    expected = expected_matches(documents, text)
    for _ in range(2):
        matches = list(index.matches(text))
        assert [length for length, _ in matches] == sorted(expected, reverse=True)
        for length, where in matches:
            there = sorted(after[:MAX_CONTINUATION_TOKENS] for after in expected[length])
            assert where[1] - where[0] == len(there)
            found = following(index, where)
            if len(there) <= MAX_SAMPLED_OCCURRENCES:
                assert sorted(found) == there
            else:
                assert MAX_SAMPLED_OCCURRENCES // 2 <= len(found) <= MAX_SAMPLED_OCCURRENCES
                assert all(after in there for after in found)


def test_the_longest_matches_are_found_among_many_occurrences() -> None:
    random = np.random.default_rng(1)
    text = random.integers(0, 3, 6000).tolist()
    needle = random.integers(0, 3, 40).tolist()
    known = [*needle, *text]
    index = index_of(known)
    matches = list(index.matches([*text, *needle[:25]]))
    length, where = matches[0]
    assert length >= 25
    assert following(index, where)[0][:15] == needle[25:]
    expected = expected_matches([known], [*text[-10:], *needle[:25]])
    assert {length: high - low for length, (low, high) in matches} == {
        length: len(those) for length, those in expected.items()
    }


def test_long_phrases_with_many_occurrences() -> None:
    random = np.random.default_rng(2)
    phrase = [5, 6, 7, 8, 9] * 4
    text = [token for _ in range(250) for token in (*random.integers(0, 3, 4).tolist(), *phrase)]
    recent = [1, 2, 1, *phrase]
    index = index_of(text)
    matches = dict(index.matches(recent))
    counts = {length: len(places([text], recent, length)) for length in range(1, 24)}
    distinct = {length for length in counts if counts[length] > counts.get(length + 1, 0)}
    assert set(matches) == distinct
    assert max(distinct) == 23
    for length, where in matches.items():
        assert where[1] - where[0] == counts[length]
        possible = Counter(tuple(after[:MAX_CONTINUATION_TOKENS]) for after in places([text], recent, length))
        found = Counter(map(tuple, following(index, where)))
        assert min(counts[length], MAX_SAMPLED_OCCURRENCES // 2) <= found.total() <= MAX_SAMPLED_OCCURRENCES
        assert found <= possible


def test_cached_ranges_give_the_same_matches() -> None:
    random = np.random.default_rng(4)
    text = random.integers(0, 40, 20_000).tolist()
    index, fresh = index_of(text), index_of(text)
    for _ in range(3):
        for at in range(100, 19_000, 61):
            recent = text[at - 5 : at]
            again = list(index.matches(recent))
            assert again == list(fresh.matches(recent))
            counts = [high - low for _, (low, high) in again]
            assert counts == sorted(counts)
            assert again[0][0] == 5
        fresh = index_of(text)


def test_empty_texts_have_no_matches() -> None:
    assert list(index_of().matches([1, 2])) == []
    assert list(index_of([1]).matches([1])) == []
