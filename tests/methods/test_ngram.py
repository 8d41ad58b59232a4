"""Prompt lookup drafts after the longest match, preferring the most recent of equal ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.methods.ngram.drafter import NgramDrafter


def guess(tokens: Sequence[int], draft_length: int = 4, longest: int = 4, shortest: int = 2) -> list[int]:
    drafter = NgramDrafter(longest, shortest)
    drafter.begin(tokens)
    tree = drafter.propose(Sampler(SamplingParams(), 0, tokens), Invariant(), draft_length)
    assert tree.tokens[0] == tokens[-1]
    assert tree.is_chain
    return list(tree.tokens[1:])


def expected_draft(
    tokens: Sequence[int], draft_length: int, longest: int = 4, shortest: int = 2
) -> list[int]:
    """Return the draft by exhaustive search."""
    for length in range(longest, shortest - 1, -1):
        for at in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and list(tokens[at - length : at]) == list(tokens[-length:]):
                known = list(tokens)
                for i in range(draft_length):
                    known.append(known[at + i])
                return known[len(tokens) :]
    return []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=100)
@given(texts, st.integers(1, 9))
def test_drafts_match_an_exhaustive_search(tokens: list[int], draft_length: int) -> None:
    assert guess(tokens, draft_length) == expected_draft(tokens, draft_length)


@settings(max_examples=100)
@given(texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_committing_in_steps_equals_one_prompt(start: list[int], rounds: list[list[int]]) -> None:
    drafter = NgramDrafter()
    drafter.begin(start)
    tokens = list(start)
    for emitted in rounds:
        drafter.commit(tuple(emitted))
        tokens += emitted
    tree = drafter.propose(Sampler(SamplingParams(), 0, tokens), Invariant(), 5)
    assert list(tree.tokens[1:]) == guess(tokens, 5)


@settings(max_examples=100)
@given(texts, texts)
def test_a_new_prompt_replaces_the_old_one(first: list[int], second: list[int]) -> None:
    drafter = NgramDrafter()
    drafter.begin(first)
    drafter.begin(second)
    tree = drafter.propose(Sampler(SamplingParams(), 0, second), Invariant(), 5)
    assert list(tree.tokens[1:]) == guess(second, 5)


def test_examples() -> None:
    assert guess([1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2]
    assert guess([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1, 2, 4]
    assert guess([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]) == [3, 8, 1, 2]
    assert guess([1, 2, 3]) == []
    assert guess([5]) == []
    assert guess([7, 7, 7, 7]) == [7, 7, 7, 7]


def test_memory_is_reported() -> None:
    drafter = NgramDrafter()
    drafter.begin([*range(300_000), 7, 8])
    assert drafter.memory_use.other_bytes == 4 * 300_002
    drafter.close()
    assert drafter.memory_use.other_bytes == 0
