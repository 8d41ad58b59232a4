"""A resized context gives bit-identical logits, and self-drafting views follow its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    MemoryBudgetError,
)
from edgespec.model.base import EarlyExit, LanguageModel, LowBit
from tests.backends.contract import (
    TREES,
    cut,
    fresh,
    path_to,
    row_of,
    step,
    tokens_for,
    tokens_to,
    tree_of,
)
from tests.backends.resizable import ALL, KINDS, LARGE, LLAMA, SMALL, Twins, check_step, load
from tests.raising import raises
from tests.tabular import TabularModel


@pytest.fixture(scope="module", params=ALL)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    folder = tmp_path_factory.mktemp("twins")
    model, whole = (load(request.param, folder, initial_context_tokens=first) for first in (SMALL, None))
    yield Twins(model, whole, KINDS[request.param].rounding)
    model.close()
    whole.close()


def reset(twins: Twins) -> Twins:
    for model in twins[:2]:
        model.interrupt(False)
        model.truncate(0)
    twins.model.resize(SMALL)
    return twins


@pytest.mark.long
def test_a_context_begins_small_and_reports_its_size(twins: Twins) -> None:
    facts = reset(twins).model.facts
    assert facts.context_tokens == SMALL == twins.model.free_tokens
    assert (twins.whole.facts.context_tokens, twins.whole.facts.max_context_tokens) == (LARGE, LARGE)
    twins.model.resize(LARGE)
    assert twins.model.facts.kv_bytes == twins.whole.facts.kv_bytes >= facts.kv_bytes
    assert twins.model.free_tokens == LARGE


@pytest.mark.long
@pytest.mark.parametrize("name", LLAMA)
def test_facts_report_the_maximum_size_from_the_beginning(name: str, tmp_path: Path) -> None:
    small, whole = (load(name, tmp_path, initial_context_tokens=first) for first in (SMALL, None))
    assert small.facts.max_context_tokens == LARGE
    assert small.facts.max_kv_bytes == whole.facts.kv_bytes
    assert small.facts.kv_bytes < whole.facts.kv_bytes or name == "mamba"
    small.close()
    whole.close()


@pytest.mark.long
def test_a_long_prompt_fits_after_a_resize(twins: Twins) -> None:
    reset(twins)
    tokens = tokens_for(twins.model, 700)
    twins.model.prefill(tokens[:200])
    with pytest.raises(ContextFullError):
        twins.model.prefill(tokens[200:])
    twins.model.resize(700 + 1)
    assert twins.model.length == 200
    twins.model.prefill(tokens[200:])
    twins.whole.prefill(tokens[:200])
    twins.whole.prefill(tokens[200:])
    check_step(twins)


@pytest.mark.long
def test_a_reply_continues_beyond_the_old_size(twins: Twins) -> None:
    reset(twins)
    tokens = tokens_for(twins.model, SMALL - 3)
    for model in twins[:2]:
        model.prefill(tokens)
    for token in (4, 5, 6, 7, 7, 6, 5, 4):
        if not twins.model.free_tokens:
            twins.model.resize(2 * SMALL)
        check_step(twins, token)
    assert twins.model.length == SMALL + 5


@pytest.mark.long
def test_a_size_below_the_cached_tokens_is_refused(twins: Twins) -> None:
    reset(twins).model.resize(LARGE)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 600))
    with raises(ContextFullError, "600"):
        twins.model.resize(599)
    with pytest.raises(ContextFullError):
        twins.model.resize(0)
    assert twins.model.facts.context_tokens == LARGE
    twins.model.resize(768)
    assert (twins.model.length, twins.model.facts.context_tokens) == (600, 768)
    check_step(twins)


def test_a_resize_ends_the_round(twins: Twins) -> None:
    reset(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 20))
    twins.model.verify(TokenTree.chain(5, [6, 7]))
    twins.model.resize(512)
    assert twins.model.length == 20
    check_step(twins)


def test_snapshots_fit_contexts_of_other_sizes(twins: Twins) -> None:
    reset(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 200))
    small, whole = twins.model.snapshot(), twins.whole.snapshot()
    twins.model.resize(LARGE)
    twins.model.prefill(tokens_for(twins.model, 300, 3))
    large = twins.model.snapshot()
    twins.model.restore(small)
    check_step(twins)
    twins.model.truncate(0)
    twins.model.resize(SMALL)
    twins.model.restore(whole)
    twins.whole.restore(small)
    check_step(twins)
    if not isinstance(twins.model, TabularModel) and "tabular" not in twins.model.facts.name:
        with pytest.raises(EdgespecError):
            twins.model.restore(large)
        assert twins.model.length == 0


def test_a_resize_ignores_an_interrupt(twins: Twins) -> None:
    reset(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 100))
    twins.model.interrupt(True)
    twins.model.resize(512)
    with pytest.raises(CancelledError):
        twins.model.verify(TokenTree.chain(4))
    twins.model.interrupt(False)
    assert twins.model.length == 100
    check_step(twins)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_resize_after_close_raises(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path, initial_context_tokens=SMALL)
    model.close()
    with pytest.raises(ClosedError):
        model.resize(512)


rounds = st.lists(
    st.tuples(
        st.sampled_from(list(TREES.values())),
        st.integers(0, 11),
        st.integers(0, 10_000),
        st.sampled_from(["commit", "commit", "prefill", "truncate", "snapshot", "restore", "resize"]),
    ),
    min_size=1,
    max_size=10,
)


def test_a_resize_to_the_same_size_keeps_a_pending_rollback(twins: Twins) -> None:
    """The recurrent state is that after the accepted tokens, not that after the last token of the pass."""
    model, whole, _ = reset(twins)
    tokens = tokens_for(model, 7)
    for one in (model, whole):
        for root in range(2):
            one.resize(one.facts.context_tokens)
            one.verify(TokenTree.chain(tokens[root], tokens[root + 1 : root + 5]))
            one.commit(())
        cut(one, tokens[:1])
    got, expected = step(model, 4), fresh(whole, [tokens[0], 4])
    np.testing.assert_allclose(got, expected, rtol=0, atol=twins.rounding)


class TestHistories:
    @pytest.mark.long
    @settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_logits_are_unchanged_after_any_history(
        self, twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(twins, history, 230)

    @pytest.mark.long
    @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_logits_are_unchanged_after_many_histories(
        self, twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(twins, history, history[0][2] % 300)

    @staticmethod
    def check(twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]], start: int) -> None:
        reset(twins)
        model, whole, rounding = twins
        kept = tokens_for(model, start, 9)

        model.resize(512)
        for one in (model, whole):
            one.prefill(kept)
        saved = (model.snapshot(), whole.snapshot(), list(kept))
        for shape, pick, seed, what in history:
            if not model.facts.capabilities.tree:
                shape = tuple(range(-1, len(shape) - 1))
            tree = tree_of(model, shape, seed)
            if what == "truncate":
                del kept[max(1, len(kept) - pick) :]
                for one in (model, whole):
                    cut(one, kept)
            elif what == "snapshot":
                saved = (model.snapshot(), whole.snapshot(), list(kept))
            elif what == "restore":
                first, second = saved[:2] if pick % 2 else (saved[1], saved[0])
                model.restore(first)
                whole.restore(second)
                kept = list(saved[2])
            elif what == "resize":
                model.resize(max(len(kept) + 64, seed % LARGE))
            elif what == "prefill":
                for one in (model, whole):
                    one.prefill(tree.tokens)
                kept += tree.tokens
            else:
                model.resize(max(model.facts.context_tokens, len(kept) + tree.width))
                logits = [one.verify(tree) for one in (model, whole)]
                for row in range(tree.width):
                    got, expected = (row_of(model, rows, row) for rows in logits)
                    np.testing.assert_allclose(got, expected, rtol=0, atol=rounding)
                node = pick % tree.width
                for one in (model, whole):
                    one.commit(path_to(tree, node))
                kept += tokens_to(tree, node)
            assert model.length == whole.length == len(kept)
        model.resize(max(model.facts.context_tokens, len(kept) + 1))
        check_step(twins)


class TestViews:
    """A view drafts after a resize as a new view does."""

    def check(self, target: LanguageModel, view: LanguageModel, fresh: Callable[[], LanguageModel]) -> None:
        target.prefill(tokens_for(target, SMALL - 40))
        for size in (512, LARGE):
            tree = tree_of(target, TREES["binary"])
            view.verify(TokenTree(tree.tokens[:3], tree.parents[:3], tree.draft_probs[:3]))
            target.resize(size)
            assert view.facts.context_tokens == size
            target.prefill(tokens_for(target, size - 20 - target.length, size))
            other = fresh()
            got, expected = (
                np.stack([row_of(target, logits, row) for row in range(tree.width)])
                for logits in (view.verify(tree), other.verify(tree))
            )
            np.testing.assert_array_equal(got, expected)
            other.close()
            target.truncate(target.length)

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["full", "split, window"])
    def test_a_low_bit_copy(self, name: str, tmp_path: Path) -> None:
        target = load(name, tmp_path, initial_context_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        how = LowBit(str(tmp_path / "copy.gguf"))
        view = target.self_draft(how)
        before = view.facts.kv_bytes
        self.check(target, view, lambda: target.self_draft(how))
        assert view.facts.kv_bytes > before
        target.close()

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["split, window"])
    def test_an_early_exit(self, name: str, tmp_path: Path) -> None:
        target = load(name, tmp_path, initial_context_tokens=SMALL)
        how = EarlyExit(target.exit_layer)  # type: ignore[attr-defined]
        self.check(target, target.self_draft(how), lambda: target.self_draft(how))
        target.close()

    def test_a_context_with_a_window_keeps_its_size(self, tmp_path: Path) -> None:
        target = load("full", tmp_path, initial_context_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        how = LowBit(str(tmp_path / "copy.gguf"), 4, 16)
        view = target.self_draft(how)
        before = view.facts.kv_bytes
        self.check(target, view, lambda: target.self_draft(how))
        assert view.facts.kv_bytes == before
        target.close()

    def test_a_copy_without_memory_keeps_its_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = load("full", tmp_path, initial_context_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        view = target.self_draft(LowBit(str(tmp_path / "copy.gguf")))
        target.prefill(tokens_for(target, 200))
        lent = view._context  # type: ignore[attr-defined]
        make = LlamaContext.allocate

        def limited(self: LlamaContext, plan: ContextPlan) -> None:
            if self is lent and plan.tokens > SMALL:
                self.release()
                raise MemoryBudgetError("no memory", "use fewer")
            make(self, plan)

        monkeypatch.setattr(LlamaContext, "allocate", limited)
        target.resize(512)
        assert (view.free_tokens, target.free_tokens) == (56, 312)
        view.verify(TokenTree.chain(4))
        target.prefill(tokens_for(target, 100))
        assert view.free_tokens == 0
        with pytest.raises(ContextFullError):
            view.verify(TokenTree.chain(4))
        target.close()

    def test_a_copy_frees_its_cache_with_that_of_the_target(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = load("full", tmp_path, initial_context_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        view = target.self_draft(LowBit(str(tmp_path / "copy.gguf")))
        own = view._context  # type: ignore[attr-defined]
        make, sizes = LlamaContext.allocate, []

        def allocate(self: LlamaContext, plan: ContextPlan) -> None:
            if self is not own:
                self.release()
                raise MemoryBudgetError("no memory", "use fewer")
            sizes.append(plan.tokens)
            make(self, plan)

        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "allocate", allocate)
            with pytest.raises(MemoryBudgetError):
                target.resize(512)
        assert 0 not in sizes
        assert own.is_lost
        assert (view.free_tokens, view.facts.kv_bytes) == (0, 0)
        target.resize(SMALL)
        target.prefill(tokens_for(target, 20))
        view.verify(TokenTree.chain(4))
        assert view.facts.kv_bytes == own.plan.kv_bytes
        target.close()

    def test_a_view_refuses_to_resize(self, tmp_path: Path) -> None:
        target = load("split", tmp_path, initial_context_tokens=SMALL)
        with raises(CapabilityError, "uses the"):
            target.self_draft(EarlyExit(1)).resize(512)
        target.close()
