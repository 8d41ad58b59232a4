"""The contract of LanguageModel, tested on every backend, including interrupts and closed models."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
)
from edgespec.model.base import LanguageModel, Snapshot
from edgespec.model.image import Image
from tests.backends.conftest import CONTEXT
from tests.backends.contract import (
    TREES,
    Rows,
    cut,
    fresh,
    needs,
    path_to,
    row_of,
    same,
    step,
    step_all,
    tokens_for,
    tokens_to,
    tree_of,
)
from tests.backends.tiny_vision import picture, png_bytes
from tests.cases import first
from tests.raising import raises

# Positions in a short context, and in one that kernels and caches split at 256 tokens.
STEPPED = (*range(64), *range(240, 288))


def rows_of_steps(model: LanguageModel) -> dict[int, Rows]:
    """Return the logits after the tokens at `STEPPED`, run one by one.

    The cache is empty before and after.
    """
    tokens, rows = tokens_for(model, 288), {}
    model.truncate(0)
    for position in STEPPED:
        model.prefill(tokens[model.length : position])
        rows[position] = step(model, tokens[position])
    model.truncate(0)
    return rows


class TestPrefillAndSteps:
    @pytest.fixture(scope="class")
    def stepped(self, shared_model: LanguageModel) -> dict[int, Rows]:
        return rows_of_steps(shared_model)

    def test_prefill_in_batches_equals_one_prefill(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 150)
        expected = fresh(model, tokens)
        model.truncate(0)
        for start in range(0, 149, 37):
            model.prefill(tokens[start : min(149, start + 37)])
        assert model.length == 149
        same(model, step(model, tokens[-1]), expected)

    def test_steps_equal_a_prefill_in_short_and_long_contexts(
        self, stepped: dict[int, Rows], model: LanguageModel
    ) -> None:
        tokens = tokens_for(model, 288)
        for length in (1, 2, 33, 64, 255, 256, 257, 272, 288):
            same(model, fresh(model, tokens[:length]), stepped[length - 1])

    @pytest.mark.parametrize("width", first([2, 100, 3, 5, 8, 17, 64], 2))
    def test_wide_passes_equal_steps_in_short_and_long_contexts(
        self, stepped: dict[int, Rows], model: LanguageModel, width: int
    ) -> None:
        width = min(width, model.facts.capabilities.max_width)
        tokens = tokens_for(model, 288)
        for start in range(0, len(tokens) - width + 1, width):
            if rows := [row for row in range(width) if start + row in stepped]:
                model.prefill(tokens[model.length : start])
                logits = model.verify(TokenTree.chain(tokens[start], tokens[start + 1 : start + width]))
                for row in rows:
                    same(model, row_of(model, logits, row), stepped[start + row])
                model.commit(tuple(range(1, width)))

    def test_an_empty_prefill_changes_nothing(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 5)
        expected = fresh(model, tokens)
        model.truncate(0)
        model.prefill([])
        model.prefill(tokens[:4])
        model.prefill([])
        assert model.length == 4
        same(model, step(model, tokens[4]), expected)

    @pytest.mark.parametrize("cached", first([20, 0, 1]))
    def test_the_pass_of_a_prompt_computes_the_logits_of_its_last_token(
        self, model: LanguageModel, cached: int
    ) -> None:
        tokens = tokens_for(model, 301)
        for length in (cached + 1, cached + 2, 33, 64, 255, 300):
            expected, following = fresh(model, tokens[:length]), step(model, tokens[length])
            model.truncate(0)
            model.prefill(tokens[:cached])
            logits = model.prefill_prompt(tokens[cached:length])
            assert model.length == length - 1
            logits = logits or model.verify(TokenTree.chain(tokens[length - 1]))
            same(model, row_of(model, logits, 0), expected)
            model.commit(())
            assert model.length == length
            same(model, step(model, tokens[length]), following)

    def test_the_verified_last_token_of_a_prompt_can_be_dropped(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 40)
        expected = fresh(model, tokens)
        model.truncate(0)
        model.prefill_prompt(tokens[:30])
        cut(model, tokens[:29])
        same(model, step_all(model, tokens[29:]), expected)

    @pytest.mark.parametrize("method", ["prefill", "prefill_prompt"])
    def test_progress_reaches_one_and_can_cancel(self, model: LanguageModel, method: str) -> None:
        seen: list[float] = []
        tokens = tokens_for(model, 200)

        def watch(what: str, fraction: float) -> bool:
            seen.append(fraction)
            return True

        getattr(model, method)(tokens, watch)
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        for _ in range(2):
            model.truncate(0)
            with pytest.raises(CancelledError):
                getattr(model, method)(tokens, lambda what, fraction: fraction < 1.0)
        cut(model, tokens[: min(model.length, 100)])
        same(model, step_all(model, tokens[model.length :]), fresh(model, tokens))


@pytest.mark.parametrize("shape", first(TREES.values(), 3), ids=TREES.keys())
class TestTrees:
    @pytest.fixture(autouse=True)
    def _able(self, model: LanguageModel, shape: tuple[int, ...]) -> None:
        needs(model, shape)

    def test_rows_equal_sequential_decoding(self, model: LanguageModel, shape: tuple[int, ...]) -> None:
        prompt, tree = tokens_for(model, 20), tree_of(model, shape)
        model.prefill(prompt)
        logits = model.verify(tree)
        rows = [row_of(model, logits, node) for node in range(tree.width)]
        for node in range(tree.width):
            same(model, rows[node], fresh(model, prompt + tokens_to(tree, node)))

    def test_growing_level_by_level_equals_one_pass(
        self, model: LanguageModel, shape: tuple[int, ...]
    ) -> None:
        prompt, whole = tokens_for(model, 20), tree_of(model, shape)
        order = sorted(range(whole.width), key=lambda node: whole.depths[node])
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        tree = TokenTree(
            tuple(whole.tokens[node] for node in order),
            tuple(place[whole.parents[node]] for node in order),
            (None,) * whole.width,
        )
        model.prefill(prompt)
        logits = model.verify(tree)
        at_once = [row_of(model, logits, node) for node in range(tree.width)]
        model.truncate(len(prompt))
        levels = [tree.depths.count(depth) for depth in range(max(tree.depths) + 1)]
        first = 0
        for count in levels:
            upto = first + count
            part = TokenTree(tree.tokens[:upto], tree.parents[:upto], (None,) * upto)
            logits = model.verify(part, first)
            for node in range(first, upto):
                same(model, row_of(model, logits, node - first), at_once[node])
            first = upto
        leaf = tree.width - 1
        model.commit(path_to(tree, leaf))
        expected = prompt + tokens_to(tree, leaf)
        assert model.length == len(expected)
        after = step(model, 4)
        same(model, after, fresh(model, [*expected, 4]))

    def test_any_path_can_be_committed(self, model: LanguageModel, shape: tuple[int, ...]) -> None:
        prompt, tree = tokens_for(model, 20), tree_of(model, shape)
        for node in range(tree.width):
            model.truncate(0)
            model.prefill(prompt)
            model.verify(tree)
            model.commit(path_to(tree, node))
            kept = prompt + tokens_to(tree, node)
            assert model.length == len(kept)
            assert model.free_tokens == model.facts.context_tokens - len(kept)
            after = [step(model, 4), step(model, 5)]
            same(model, after[1], fresh(model, [*kept, 4, 5]))

    def test_an_abandoned_round_leaves_the_cache_unchanged(
        self, model: LanguageModel, shape: tuple[int, ...]
    ) -> None:
        prompt, tree = tokens_for(model, 20), tree_of(model, shape)
        expected = fresh(model, [*prompt, 4])
        cut(model, prompt)
        model.verify(tree)
        model.verify(tree)
        model.truncate(20)
        assert model.length == 20
        same(model, step(model, 4), expected)


class TestSnapshots:
    def test_restore_brings_back_the_saved_cache(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 40)
        model.prefill(tokens)
        snapshot = model.snapshot()
        assert snapshot.length == 40
        model.truncate(10)
        model.prefill(tokens_for(model, 60, 2))
        model.restore(snapshot)
        assert model.length == 40
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    def test_partial_snapshots_restore_the_whole_cache(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 60)
        model.prefill(tokens)
        last = model.snapshot(45)
        cut(model, tokens[:45])
        middle = model.snapshot(20)
        cut(model, tokens[:20])
        first = model.snapshot()
        assert last.start == (45 if model.facts.capabilities.partial_truncate else 0)
        cut(model, tokens_for(model, 8, 2))
        for piece in (first, middle, last):
            model.restore(piece)
            assert model.length == piece.length
        assert model.length == 60
        same(model, step(model, 4), fresh(model, [*tokens, 4]))
        if model.facts.capabilities.partial_truncate:
            cut(model, tokens[:30])
            same(model, step(model, 4), fresh(model, [*tokens[:30], 4]))

    def test_snapshots_without_partial_truncate_hold_the_whole_cache(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 60)
        model.prefill(tokens)
        if not model.facts.capabilities.partial_truncate:
            assert (whole := model.snapshot(20, 45)).start == 0
            assert whole.length == 60
            return
        pieces = [model.snapshot(start, end) for start, end in ((0, 20), (20, 45), (45, 99))]
        assert [(piece.start, piece.length) for piece in pieces] == [(0, 20), (20, 45), (45, 60)]
        assert model.length == 60
        cut(model, tokens_for(model, 8, 2))
        for piece in pieces:
            model.restore(piece)
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    def test_a_partial_snapshot_restores_only_at_its_position(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 40)
        model.prefill(tokens)
        piece = model.snapshot(30)
        if not piece.start:
            pytest.skip("its memory is saved whole")
        model.truncate(20)
        with pytest.raises(BackendError):
            model.restore(piece)
        assert model.length <= 20
        cut(model, tokens[: model.length])
        model.prefill(tokens[model.length : 30])
        model.restore(piece)
        same(model, step(model, 4), fresh(model, [*tokens, 4]))
        model.truncate(0)
        model.prefill(tokens[:30])
        with pytest.raises(BackendError):
            model.restore(Snapshot(40, b"not a snapshot", 30))
        assert model.length in (0, 30)

    def test_invalid_snapshots_raise_and_the_model_stays_usable(self, model: LanguageModel) -> None:
        model.prefill(tokens_for(model, 10))
        with pytest.raises(BackendError):
            model.restore(Snapshot(10, b"not a snapshot"))
        tokens = tokens_for(model, 10)
        model.truncate(0)
        model.prefill(tokens)
        same(model, step(model, 4), fresh(model, [*tokens, 4]))


class TestLimits:
    def test_a_prefill_that_does_not_fit_changes_nothing(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 30)
        model.prefill(tokens)
        with pytest.raises(ContextFullError):
            model.prefill([4] * (model.free_tokens + 1))
        assert model.length == 30
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    def test_the_context_can_be_filled_to_the_last_token(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, model.facts.context_tokens - 3)
        model.prefill(tokens)
        with pytest.raises(ContextFullError):
            model.verify(TokenTree.chain(4, [5, 6, 7]))
        model.verify(TokenTree.chain(4, [5, 6]))
        model.commit((1, 2))
        assert model.free_tokens == 0
        with pytest.raises(ContextFullError):
            model.verify(TokenTree.chain(4))
        cut(model, tokens)
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    def test_a_tree_that_outgrows_the_context_ends_the_round(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, model.facts.context_tokens - 3)
        model.prefill(tokens)
        model.verify(TokenTree.chain(4, [5]))
        with pytest.raises(ContextFullError):
            model.verify(TokenTree.chain(4, [5, 6, 7]), 2)
        assert model.length == len(tokens)
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    def test_too_many_branches_or_rows_raise_and_change_nothing(self, model: LanguageModel) -> None:
        capabilities = model.facts.capabilities
        tokens = tokens_for(model, 10)
        expected = fresh(model, [*tokens, 4])
        fan = capabilities.max_branches + 1
        wide = capabilities.max_width + 1
        if max(fan, wide) > model.facts.context_tokens:
            pytest.skip("this backend has no such limits")
        for tree in (
            TokenTree(tuple(range(3, 4 + fan)), (-1, *(0,) * fan), (None,) * (fan + 1)),
            TokenTree.chain(3, [4] * (wide - 1)),
        ):
            cut(model, tokens)
            with pytest.raises(CapabilityError):
                model.verify(tree)
            assert model.length == 10
            same(model, step(model, 4), expected)


class TestVocabulary:
    def test_model_facts_are_consistent(self, model: LanguageModel) -> None:
        facts, vocabulary = model.facts, model.vocabulary
        assert vocabulary.size == facts.vocab_size
        assert facts.chat_template == (vocabulary.chat_template is not None)
        assert any(vocabulary.is_end(token) for token in range(vocabulary.size))
        assert facts.capabilities.rollback
        assert facts.capabilities.tree == (facts.capabilities.reason == "")

    def test_tokenize_round_trip(self, model: LanguageModel) -> None:
        letters = model.facts.architecture == "tabular"
        text = "abcd" if letters else "List the files 🙂 é\n\ttab"
        tokens = model.vocabulary.tokenize(text, special=False, start=False)
        said = b"".join(model.vocabulary.piece(token) for token in tokens).decode()
        assert said.strip() == text.strip()

    def test_min_tokens_is_a_lower_bound(self, model: LanguageModel) -> None:
        vocabulary = model.vocabulary
        for text in (
            "a",
            "file " * 99,
            " " * 999 + "a",
            "a" + "\n" * 999 + "a",
            "<|im_end|>" * 99,
            "=-" * 99,
            "汉🙂é" * 99,
        ):
            for special in (False, True):
                count = len(vocabulary.tokenize(text, special=special, start=False))
                assert vocabulary.min_tokens(text) <= count, text
        assert vocabulary.min_tokens("a" * 10_000) > 10


def test_a_text_model_refuses_images(model: LanguageModel) -> None:
    assert not model.facts.sees_images
    with raises(CapabilityError, model.facts.name, code="images_not_supported"):
        model.prepare_image(Image.read(png_bytes(picture())))


class TestInterrupt:
    def test_no_pass_runs_until_the_interrupt_is_lifted(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 30)
        expected = fresh(model, [*tokens, 4])
        model.truncate(0)
        model.prefill(tokens)
        model.interrupt(True)
        for forbidden in (lambda: model.prefill([4, 5]), lambda: model.verify(TokenTree.chain(4, [5]))):
            with pytest.raises(CancelledError):
                forbidden()
            assert model.length == 30
        model.interrupt(False)
        same(model, step(model, 4), expected)

    def test_an_interrupt_ends_a_growing_round(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 30)
        model.prefill(tokens)
        model.verify(TokenTree.chain(4, [5]))
        model.interrupt(True)
        with pytest.raises(CancelledError):
            model.verify(TokenTree.chain(4, [5, 6]), 2)
        model.interrupt(False)
        assert model.length == 30
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    @pytest.mark.parametrize(
        "delay",
        first([0.002, 0.0, 0.0005, 0.005, 0.01, 0.02, 0.05]),
    )
    @pytest.mark.parametrize("work", ["prefill", "verify"])
    def test_from_another_thread_at_any_moment(self, model: LanguageModel, work: str, delay: float) -> None:
        tokens = tokens_for(model, 20)
        model.prefill(tokens)
        more = tokens_for(model, min(480, model.free_tokens), 3)
        wide = TokenTree.chain(more[0], more[1 : min(model.facts.capabilities.max_width, len(more))])
        timer = threading.Timer(delay, model.interrupt, [True])
        timer.start()
        try:
            run: Callable[[], object] = (
                (lambda: model.prefill(more)) if work == "prefill" else (lambda: model.verify(wide))
            )
            run()
        except CancelledError:
            pass
        finally:
            timer.join()
            model.interrupt(False)
        known = (tokens + more)[: min(model.length, CONTEXT - 1)] if work == "prefill" else tokens
        cut(model, known)
        same(model, step(model, 4), fresh(model, [*known, 4]))


class TestClosing:
    def test_closing_twice_does_nothing(self, own_model: LanguageModel) -> None:
        own_model.close()
        own_model.close()

    def test_every_call_after_close_raises(self, own_model: LanguageModel) -> None:
        own_model.prefill([3, 4])
        own_model.verify(TokenTree.chain(5, [6]))
        snapshot = own_model.snapshot()
        own_model.verify(TokenTree.chain(5, [6]))
        own_model.close()
        calls: list[Callable[[], object]] = [
            lambda: own_model.prefill([3]),
            lambda: own_model.prefill_prompt([3, 4]),
            lambda: own_model.verify(TokenTree.chain(3)),
            lambda: own_model.commit(()),
            lambda: own_model.truncate(0),
            own_model.snapshot,
            lambda: own_model.restore(snapshot),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        own_model.interrupt(True)
        own_model.interrupt(False)
