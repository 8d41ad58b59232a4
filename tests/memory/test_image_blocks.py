"""Prefixes with images are reused only where a fresh prefill would also start a new pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.memory.prefix_cache.store import reusable_tokens
from edgespec.memory.target_cache import _pass_ends
from edgespec.model.image_tokens import contains_image, image_token_ids, token_runs, whole_images
from tests.tables import table

BLOCK = 16
EXACT = table(0).facts.capabilities
BLOCKS = replace(EXACT, reuse_block_tokens=BLOCK, partial_truncate=True)
RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=6)


def sequence(runs: list[tuple[bool, int]]) -> list[int]:
    """Return text and images of these lengths, followed by text."""
    tokens = [1, 2]
    for number, (is_image, length) in enumerate(runs):
        tokens += image_token_ids(b"%d" % number, length) if is_image else [3] * length
    return [*tokens, 4, 5]


@given(RUNS, st.data())
def test_images_are_reused_as_a_whole(runs: list[tuple[bool, int]], data: st.DataObject) -> None:
    tokens = sequence(runs)
    length = data.draw(st.integers(0, len(tokens)))
    whole = reusable_tokens(EXACT, tokens, length)
    boundaries = {0, len(tokens)}
    for start, end, is_image in token_runs(tokens):
        boundaries |= {start, end} if is_image else set(range(start, end + 1))
    assert whole == max(each for each in boundaries if each <= length) == whole_images(tokens, length)


@given(RUNS, st.data())
def test_passes_after_a_reused_prefix_are_those_of_a_fresh_prefill(
    runs: list[tuple[bool, int]], data: st.DataObject
) -> None:
    tokens = sequence(runs)
    begin = reusable_tokens(BLOCKS, tokens, data.draw(st.integers(0, len(tokens))))
    ends = list(_pass_ends(tokens, begin, BLOCK))
    fresh = set(_pass_ends(tokens, 0, BLOCK))
    # In both cases, text ends with a pass for the tokens after the last whole block.
    assert set(ends) <= fresh
    for start, end in pairwise([begin, *ends]):
        assert contains_image(tokens[start:end]) <= (len(list(token_runs(tokens[start:end]))) == 1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_text_alone_ends_with_the_rest_after_the_last_whole_block(length: int) -> None:
    whole = length - length % BLOCK
    assert set(_pass_ends([3] * length, 0, BLOCK)) == {*([whole] if whole else []), length}


def test_contents_have_their_own_ids() -> None:
    one, two = image_token_ids(b"a", 50), image_token_ids(b"b", 50)
    assert not set(one) & set(two)
    assert image_token_ids(b"a", 50) == one
    assert all(token < 1 << 31 for token in one)
