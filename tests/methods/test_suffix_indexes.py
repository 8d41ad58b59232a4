"""The suffix automaton counts every substring, and the suffix array finds every match length."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, MAX_MATCH_TOKENS, MAX_SAMPLED_OCCURRENCES
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixArray, SuffixAutomaton, SuffixRange
from tests.cases import first
from tests.methods.exhaustive_search import (
    Text,
    automaton_of,
    count_continuations,
    expected_matches,
    index_of,
    letters,
    places,
    texts,
)


def check_following(automaton: SuffixAutomaton, pattern: Text, state: int, depth: int) -> None:
    text = automaton.tokens.tolist()
    total, branches = automaton.continuations(state)
    expected = count_continuations(text, pattern)
    assert [branch[:3] for branch in branches] == expected
    assert total == sum(count for count, _, _ in expected)
    if depth:
        for _, _, token, there in branches[:2]:
            check_following(automaton, [*pattern, token], there, depth - 1)


def check_matches(automaton: SuffixAutomaton, recent: Text, state: int, length: int) -> None:
    """Check that every suffix that occurred is found, with its continuations."""
    text = automaton.tokens.tolist()
    found = dict(automaton.suffixes(state, length))
    assert list(found) == sorted(found, reverse=True)
    for size in range(1, min(len(recent), MAX_MATCH_TOKENS) + 1):
        pattern = recent[len(recent) - size :]
        longer = [length for length in found if length >= size]
        expected = count_continuations(text, pattern)
        if longer:
            branches = automaton.continuations(found[min(longer)])[1]
            assert [branch[:3] for branch in branches] == expected
        else:
            assert expected == []
    for length, state in found.items():
        check_following(automaton, recent[len(recent) - length :], state, 3)


class TestOwnSequence:
    @pytest.mark.long
    @settings(max_examples=150)
    @given(texts)
    def test_finds_all_repeated_suffixes(self, text: Text) -> None:
        automaton = automaton_of(text)
        check_matches(automaton, text, *automaton.longest_repeated_suffix())
        found = [length for length, _ in automaton.suffixes(*automaton.longest_repeated_suffix())]
        assert sorted(found) == sorted(expected_matches([text], text))

    @pytest.mark.long
    @settings(max_examples=100)
    @given(texts, st.lists(st.lists(letters, min_size=1, max_size=9), max_size=8), st.integers(1, 20))
    def test_appending_in_steps_keeps_the_end_of_a_long_sequence(
        self, start: Text, rounds: list[Text], most: int
    ) -> None:
        automaton = SuffixAutomaton(capacity_tokens=most)
        automaton.set_tokens(start)
        everything = list(start)
        for emitted in rounds:
            automaton.extend(emitted)
            everything += emitted
        kept = automaton.tokens.tolist()
        assert kept == everything[len(everything) - len(kept) :]
        assert min(most, len(everything)) <= len(kept) <= 2 * most
        check_matches(automaton, kept, *automaton.longest_repeated_suffix())

    @settings(max_examples=100)
    @given(texts, texts, st.booleans(), st.integers(5, 100))
    def test_a_continued_sequence_is_not_indexed_again(
        self, first: Text, more: Text, goes_on: bool, most: int
    ) -> None:
        second = [*first, *more] if goes_on else more
        automaton = SuffixAutomaton(capacity_tokens=most)
        assert automaton.set_tokens(first) == len(first)
        read = automaton.set_tokens(second)
        if goes_on:
            assert read == len(more)
        elif second[: len(first)] != first and len(first) <= most:
            assert read == len(second)
        text = automaton.tokens.tolist()
        assert text == second[len(second) - len(text) :]
        assert len(text) >= min(most, len(second))
        check_matches(automaton, text, *automaton.longest_repeated_suffix())

    @pytest.mark.long
    @pytest.mark.parametrize("period", [1, 2, 3, 7])
    def test_counts_in_a_loop(self, period: int) -> None:
        text = [9, *(list(range(period)) * (1200 // period))]
        automaton = automaton_of(text)
        state, length = automaton.longest_repeated_suffix()
        assert length == MAX_MATCH_TOKENS
        matches = list(automaton.suffixes(state, length))
        assert [length for length, _ in matches] == sorted(expected_matches([text], text), reverse=True)
        for length, state in matches[:3] + matches[-3:]:
            check_following(automaton, text[-length:], state, 2)

    def test_counts_are_exact_far_after_a_long_match(self) -> None:
        random = np.random.default_rng(3)
        phrase = random.integers(0, 9, MAX_MATCH_TOKENS + MAX_CONTINUATION_TOKENS + 10).tolist()
        text: Text = []
        for cut in (100, 70, 60, 50, 74, 66):
            text += [*phrase[:cut], *random.integers(0, 9, 4).tolist()]
        text += phrase[: MAX_MATCH_TOKENS + 5]
        automaton = automaton_of(text)
        state, length = automaton.longest_repeated_suffix()
        assert length == MAX_MATCH_TOKENS
        pattern = text[-MAX_MATCH_TOKENS:]
        for _ in range(MAX_CONTINUATION_TOKENS - 1):
            total, branches = automaton.continuations(state)
            expected = count_continuations(text, pattern)
            assert [branch[:3] for branch in branches] == expected
            assert total == sum(count for count, _, _ in expected)
            pattern, state = [*pattern, branches[0][2]], branches[0][3]

    @settings(max_examples=30)
    @given(st.integers(0, 1000), st.sampled_from([0.05, 0.1, 0.3]))
    def test_no_frequent_continuation_is_missed_among_many(self, seed: int, rarest: float) -> None:
        # Many tokens follow 0, and the frequent ones change over time.
        random = np.random.default_rng(seed)
        automaton = SuffixAutomaton(rarest)
        text: Text = []
        for phase in range(12):
            bits = []
            for _ in range(random.integers(1, 60)):
                often = random.random() < 0.3
                bits += [0, phase % 4 + 1 if often else int(random.integers(5, 60))]
            text += bits
            automaton.extend([*bits, 0])
            text.append(0)
            ((_, state),) = [
                match for match in automaton.suffixes(*automaton.longest_repeated_suffix()) if match[0] == 1
            ]
            total, branches = automaton.continuations(state)
            expected = count_continuations(text, [0])
            assert total == sum(count for count, _, _ in expected)
            frequent = [branch for branch in expected if branch[0] >= rarest * total]
            assert [branch[:3] for branch in branches][: len(frequent)] == frequent


class TestMatcher:
    @pytest.mark.long
    @settings(max_examples=150)
    @given(st.lists(texts, max_size=4), texts, st.lists(texts, max_size=4))
    def test_follows_the_suffixes_of_another_sequence(
        self, documents: list[Text], start: Text, rounds: list[Text]
    ) -> None:
        automaton = SuffixAutomaton()
        for document in documents:
            automaton.extend([*document, SEPARATOR])
        match = automaton.follow((0, 0), start)
        text = list(start)
        for emitted in [[], *rounds]:
            match = automaton.follow(match, emitted)
            text += emitted
            assert match[1] <= MAX_MATCH_TOKENS
            check_matches(automaton, text, *match)
            followed = {
                length for length in range(1, MAX_MATCH_TOKENS + 1) if places(documents, text, length)
            }
            assert followed <= set(range(1, match[1] + 1))

    def test_nothing_matches_across_separators(self) -> None:
        automaton = SuffixAutomaton()
        for document in ([1, 2, 3], [4, 5, 6]):
            automaton.extend([*document, SEPARATOR])
        match = automaton.follow((0, 0), [2, 3, 4])
        assert match[1] == 1
        state, length = automaton.follow(match, [5])
        assert length == 2
        assert [token for _, _, token, _ in automaton.continuations(state)[1]] == [6]
        state, _ = automaton.follow((0, 0), [2, 3])
        assert automaton.continuations(state) == (0, [])


def test_memory_is_bounded() -> None:
    random = np.random.default_rng(1)
    automaton = SuffixAutomaton(capacity_tokens=500)
    for size in (3, 400, 20):
        for _ in range(20):
            automaton.extend(random.integers(0, size, 77).tolist())
            assert 500 <= len(automaton.tokens) <= 1000 or len(automaton.tokens) < 20 * 77
    automaton.extend(range(5000))
    assert automaton.tokens.tolist() == list(range(4500, 5000))


@pytest.mark.long
@pytest.mark.parametrize("letters", first([2, 1 << 20, 5, 300], 2))
def test_size_bytes_is_close_to_the_real_size(letters: int) -> None:
    text = (np.random.default_rng(1).integers(0, letters, 10_000) + 1000).tolist()
    tracemalloc.start()
    try:
        automaton = automaton_of(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * taken < automaton.size_bytes < 1.25 * taken
    assert automaton.size_bytes < 350 * len(text)


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
