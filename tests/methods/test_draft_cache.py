"""The draft cache prefills within its budget, and gives the model the whole sequence or its two ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends import llamacpp
from edgespec.engine.tree import TokenTree
from edgespec.methods.draft_cache import DraftCache
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.tiny_models import write_llama
from tests.tables import VOCAB, table

OPTIONS = LoadOptions(context_tokens=256)
SINKS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    model = llamacpp.load(
        str(write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", layers=2)), "tiny", OPTIONS
    )
    yield model
    model.close()


def text_of(model: LanguageModel, length: int) -> list[int]:
    random = np.random.default_rng(length)
    return [int(token) for token in random.integers(3, model.facts.vocab_size, length)]


def guess(cache: DraftCache) -> NDArray[np.float32]:
    """Return the logits after the last token without changing the cache."""
    model = cache.model
    held = model.length
    lag = cache.visible_tokens[held:]
    row = len(lag) - 1
    logits = model.verify(TokenTree.chain(lag[0], lag[1:])).at(row, np.arange(model.facts.vocab_size))
    model.truncate(held)
    return np.array(logits)


def fresh(model: LanguageModel, shown: list[int]) -> NDArray[np.float32]:
    """Return the same logits after a prefill of only the visible tokens."""
    model.truncate(0)
    cache = DraftCache(model)
    cache.begin(shown)
    cache.prefill()
    return guess(cache)


class TestWithARealModel:
    def test_a_long_sequence_is_cut_to_its_first_tokens_and_its_end(self, model: LanguageModel) -> None:
        text = text_of(model, 90)
        model.truncate(0)
        cache = DraftCache(model)
        cache.begin(text)
        assert (cache.pending_tokens, cache.full_pending_tokens) == (88, 88)
        cache.prefill(20)
        assert cache.visible_tokens[:SINKS] == text[:SINKS]
        assert cache.visible_tokens[SINKS:] == text[-len(cache.visible_tokens) + SINKS :]
        assert len(cache.visible_tokens) <= 21
        assert (cache.pending_tokens, cache.full_pending_tokens) == (0, 90)
        got = guess(cache)
        np.testing.assert_allclose(got, fresh(model, cache.visible_tokens), atol=1e-4)

    def test_catching_up_prefills_only_new_tokens(self, model: LanguageModel) -> None:
        text = text_of(model, 90)
        model.truncate(0)
        cache = DraftCache(model)
        cache.begin(text)
        cache.prefill(20)
        shown, held = list(cache.visible_tokens), model.length
        cache.extend((5, 6, 7, 8))
        assert cache.pending_tokens == 3
        cache.prefill(50)
        assert cache.visible_tokens == [*shown, 5, 6, 7, 8]
        assert model.length == held + 4

    def test_a_full_prefill_gives_the_logits_of_a_fresh_model(self, model: LanguageModel) -> None:
        text = text_of(model, 90)
        model.truncate(0)
        cache = DraftCache(model)
        cache.begin(text)
        cache.prefill(20)
        cache.extend((5, 6, 7))
        part = guess(cache)
        cache.prefill(cache.full_pending_tokens)
        assert cache.visible_tokens == [*text, 5, 6, 7]
        assert cache.pending_tokens == cache.full_pending_tokens == 0
        whole = guess(cache)
        np.testing.assert_allclose(whole, fresh(model, [*text, 5, 6, 7]), atol=1e-4)
        assert np.abs(whole - part).max() > 1e-2

    def test_the_next_turn_keeps_the_common_prefix(self, model: LanguageModel) -> None:
        text = text_of(model, 60)
        model.truncate(0)
        cache = DraftCache(model)
        cache.begin(text)
        cache.prefill()
        cache.begin([*text[:40], *text_of(model, 12)])
        assert model.length == 40
        assert cache.pending_tokens == 10


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=40),
    st.lists(
        st.one_of(
            st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
            st.integers(0, 60),
            st.none(),
        ),
        max_size=10,
    ),
)
def test_visible_tokens_are_the_sequence_or_its_start_and_end(
    text: list[int], acts: list[list[int] | int | None]
) -> None:
    """Run random steps: append tokens, prefill with a budget, or prefill everything."""
    model, whole = table(1), list(text)
    cache = DraftCache(model)
    cache.begin(text)
    for act in acts:
        if isinstance(act, list):
            cache.extend(tuple(act))
            whole += act
            continue
        unread, held = cache.pending_tokens, model.length
        cache.prefill(act)
        if act is not None and act >= SINKS:
            assert cache.pending_tokens <= max(unread - act, 0)
        if act is None:
            assert cache.visible_tokens == whole
            assert cache.pending_tokens == 0
        else:
            most = max(act, SINKS)
            assert model.length <= max(held, most) + 1 + (unread if unread <= most else 0)
        end = len(cache.visible_tokens) - SINKS
        assert (
            cache.visible_tokens == whole or cache.visible_tokens == whole[:SINKS] + whole[len(whole) - end :]
        )
        assert cache.visible_tokens[-1] == whole[-1]
