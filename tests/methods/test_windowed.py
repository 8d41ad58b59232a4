"""A draft model with an attention window keeps the first and last tokens of sequences of any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    OptionError,
)
from edgespec.methods.model.windowed import AttentionWindow, WindowedModel, choose_draft_window
from edgespec.model.base import LanguageModel, LoadOptions, Snapshot
from tests.backends.contract import step
from tests.backends.rewindable import StateModel, replayed_table
from tests.raising import raises
from tests.tables import near, runtime, table
from tests.tabular import TabularModel

WINDOW = AttentionWindow(sink_tokens=3, window_tokens=16)
INNER = 3 + 16 + 4 + 8  # sinks, window, slack, and room for a round of 8
CONTEXT = 400
VOCAB = 11


class Forgetless(TabularModel):
    """A table model that can truncate but not remove a range."""

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError("not this one")


def a_table(kind: type[TabularModel] = TabularModel) -> TabularModel:
    logits = np.random.default_rng(0).normal(size=(VOCAB**2, VOCAB)).astype(np.float32)
    return kind(logits, context_tokens=INNER)


MODELS: dict[str, Callable[[], Any]] = {
    "forgets": a_table,
    "cannot forget": lambda: a_table(Forgetless),
    "cannot roll back": lambda: replayed_table(StateModel(context_tokens=INNER)),
}


def held_by(model: Any) -> list[int]:
    """Return the tokens in the inner cache."""
    tokens: list[int] = model._tokens if isinstance(model, TabularModel) else model._known
    return tokens


def check_cache(model: Any, text: list[int], at_least: int) -> None:
    """Check that the inner cache holds the sinks and at least `at_least` last tokens."""
    held = held_by(model)
    sinks, recent = held[:3], held[3:]
    assert sinks == text[: len(sinks)]
    assert recent == text[len(text) - len(recent) :]
    assert len(recent) >= min(at_least, len(text) - 3)


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
ROUNDS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), TOKENS),
        st.tuples(st.just("truncate"), st.integers(0, 120)),
        st.tuples(st.just("round"), st.tuples(st.integers(1, 8), st.integers(0, 7))),
        st.tuples(st.just("snapshot"), st.integers(0, 120)),
        st.tuples(st.just("interrupt"), TOKENS),
    ),
    max_size=14,
)


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
@settings(max_examples=70)
@given(rounds=ROUNDS)
def test_the_cache_holds_the_first_and_last_tokens(make: Callable[[], Any], rounds: list[Any]) -> None:
    inner = make()
    model = WindowedModel(inner, WINDOW, CONTEXT)
    text: list[int] = []
    for what, how in rounds:
        if what == "prefill" and len(text) + len(how) <= CONTEXT:
            model.prefill(how)
            text += how
        elif what == "truncate":
            model.truncate(how)
            text = text[:how]
        elif what == "snapshot":
            saved = model.snapshot()
            model.truncate(how)
            model.restore(saved)
        elif what == "interrupt":
            model.interrupt(True)
            if how:
                with pytest.raises(CancelledError):
                    model.prefill(how)
            model.interrupt(False)
            # Evicted tokens count as processed. Nothing was run.
            text = (text + how)[: model.length]
        elif what == "round":
            width, kept = how
            tree = TokenTree.chain(1, [(i * 7 + len(text)) % VOCAB for i in range(width - 1)])
            logits = model.verify(tree)
            # Sinks and window were completed before the pass.
            seen = [*text, 1][-2:] if text else [0, 1]
            table_row = seen[0] * VOCAB + seen[1]
            np.testing.assert_array_equal(
                logits.at(0, np.arange(VOCAB)), a_table()._table[table_row].astype(np.float64)
            )
            path = tuple(range(1, min(kept, width - 1) + 1))
            model.commit(path)
            text += [tree.tokens[0], *(tree.tokens[node] for node in path)]
            check_cache(inner, text, at_least=4)
        assert model.length == len(text)
        assert model.free_tokens == CONTEXT - len(text)
        assert inner.length <= INNER


def test_truncating_inside_the_window_recomputes_nothing() -> None:
    inner = a_table()
    model = WindowedModel(inner, WINDOW, CONTEXT)
    model.prefill([i % VOCAB for i in range(200)])
    assert held_by(inner) == [0, 1, 2, *(i % VOCAB for i in range(184, 200))]
    model.truncate(195)
    assert held_by(inner) == [0, 1, 2, *(i % VOCAB for i in range(184, 195))]


def test_only_visible_tokens_of_a_prompt_are_prefilled() -> None:
    run: list[int] = []

    class Counting(TabularModel):
        def prefill(self, tokens: Any, progress: Any = None) -> None:
            run.append(len(tokens))
            super().prefill(tokens, progress)

    model = WindowedModel(a_table(Counting), WINDOW, CONTEXT)
    model.prefill([1] * 300)
    assert sum(run) == 19


def test_a_window_that_became_too_small_is_recomputed() -> None:
    inner = a_table()
    model = WindowedModel(inner, WINDOW, CONTEXT)
    text = [i % VOCAB for i in range(200)]
    model.prefill(text)
    model.truncate(186)
    step(model, 5)
    assert held_by(inner) == [*text[:3], *text[170:186], 5]


def test_branches() -> None:
    inner = a_table()
    model = WindowedModel(inner, WINDOW, CONTEXT)
    text = [i % VOCAB for i in range(100)]
    model.prefill(text)
    model.verify(TokenTree((1, 2, 3), (-1, 0, 0), (None,) * 3))
    model.verify(TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 2), (None,) * 5), 3)
    model.commit((2, 4))
    assert model.length == 103
    check_cache(inner, [*text, 1, 3, 5], at_least=16)


class TestErrors:
    def test_inner_context_too_small(self) -> None:
        with raises(OptionError, code="option_not_supported", option="draft_window"):
            WindowedModel(a_table(), AttentionWindow(3, 100), CONTEXT)

    def test_sequence_too_long(self) -> None:
        model = WindowedModel(a_table(), WINDOW, CONTEXT)
        model.prefill([1] * 399)
        with pytest.raises(ContextFullError):
            model.prefill([1, 2])
        with pytest.raises(ContextFullError):
            model.verify(TokenTree.chain(1, [2]))
        assert (model.length, model.free_tokens) == (399, 1)
        step(model, 1)

    def test_tree_too_wide(self) -> None:
        model = WindowedModel(a_table(), WINDOW, CONTEXT)
        assert model.facts.capabilities.max_width == 8
        with raises(CapabilityError, "of 8", code="draft_too_wide"):
            model.verify(TokenTree.chain(1, [2] * 8))

    def test_invalid_snapshot(self) -> None:
        model = WindowedModel(a_table(), WINDOW, CONTEXT)
        for snapshot in (Snapshot(2, b"nothing"), Snapshot(3, b"[1, 2]"), Snapshot(401, b"[1]")):
            with raises(BackendError, code="state_not_restored"):
                model.restore(snapshot)
        assert model.length == 0

    def test_calls_after_close(self) -> None:
        model = WindowedModel(a_table(), WINDOW, CONTEXT)
        model.close()
        with pytest.raises(ClosedError):
            model.prefill([1])
        with pytest.raises(ClosedError):
            model.verify(TokenTree.chain(1))


@pytest.mark.parametrize("trained", [256, 300, 512, 1000, 1412, 5000, 0])
def test_limited_to_the_trained_context(trained: int) -> None:
    window = AttentionWindow().limited_to(trained)
    if not trained or trained >= AttentionWindow().context_tokens:
        assert window == AttentionWindow()
    else:
        assert trained - 4 <= window.context_tokens <= trained


@pytest.mark.parametrize(
    ("context", "trained", "asked", "expected"),
    [
        (8192, 8192, None, None),
        (8192, 0, None, None),
        (8192, 2048, None, AttentionWindow()),
        (8192, 1024, None, AttentionWindow(4, 713)),
        (8192, 8192, 512, AttentionWindow(4, 512)),
        (8192, 2048, 0, None),
        (1024, 8192, 2048, None),
    ],
)
def test_choose_draft_window(
    context: int, trained: int, asked: int | None, expected: AttentionWindow | None
) -> None:
    assert choose_draft_window(context, trained, asked) == expected


def test_the_inner_context_may_exceed_the_window() -> None:
    inner = a_table()
    inner.facts = replace(inner.facts, context_tokens=300)
    model = WindowedModel(inner, WINDOW, CONTEXT)
    model.prefill([1] * 200)
    for _ in range(50):
        step(model, 2)
        assert inner.length <= 3 + 16 + 4 + 1


class TestInARuntime:
    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    @pytest.mark.parametrize("branches", [(), (2, 2)])
    def test_replies_are_identical_and_drafted_to_the_end(
        self, temperature: float, branches: tuple[int, ...]
    ) -> None:
        target = table(1, end=-30.0)
        small = TabularModel(near(target, 2, noise=0.3)._table, context_tokens=40)
        draft = WindowedModel(small, WINDOW, target.facts.context_tokens)
        options: dict[str, Any] = {"max_tokens": 150, "seed": 4, "temperature": temperature}
        with runtime(target, draft, branches=branches) as pair:
            plain = pair.generate("abcab" * 20, method="none", **options)
            for _ in range(2):
                got = pair.generate("abcab" * 20, method="model", **options)
                assert got.tokens == plain.tokens
                assert (got.stats.acceptance_rate or 0.0) > (0.3 if not branches else 0.15)
            assert small.length <= 40


def llama(path: Path, context: int, **options: Any) -> LanguageModel:
    return llamacpp.load(str(path), path.stem, LoadOptions(context_tokens=context, **options))


@pytest.mark.long
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_on_llama_cpp(demo_target: Path, demo_draft: Path, kv_type: str) -> None:
    """The prompt and the reply exceed the window, but replies are identical and memory stays constant."""
    window = AttentionWindow(4, 24)
    with runtime(
        llama(demo_target, 512),
        WindowedModel(llama(demo_draft, window.context_tokens, kv_type=kv_type, is_draft=True), window, 512),
    ) as pair:
        assert pair.draft is not None
        kv_bytes = pair.draft.kv_bytes
        prompt = "List the files of a folder by size, the largest first. " * 10
        options: dict[str, Any] = {"max_tokens": 90, "seed": 3, "temperature": 0.0}
        plain = pair.generate(prompt, method="none", **options)
        got = pair.generate(prompt, method="model", **options)
        assert got.tokens == plain.tokens
        assert got.stats.drafted_tokens > 50
        assert got.stats.accepted_tokens > 0
        assert pair.draft.kv_bytes == kv_bytes == got.stats.draft_kv_bytes


def test_on_mlx() -> None:
    """MLX cannot remove a range, so the window is recomputed."""
    pytest.importorskip("mlx.core")
    from edgespec.backends import mlx
    from edgespec.store.catalogue import models_folder

    folder, window = models_folder(), AttentionWindow(4, 24)
    with runtime(
        mlx.load(str(folder / "demo-mlx-draft"), "demo-mlx-draft", LoadOptions(context_tokens=320)),
        WindowedModel(
            mlx.load(
                str(folder / "demo-mlx-draft"),
                "demo-mlx-draft",
                LoadOptions(context_tokens=window.context_tokens, is_draft=True),
            ),
            window,
            320,
        ),
    ) as pair:
        prompt = "List the files of a folder by size. " * 8
        options: dict[str, Any] = {"max_tokens": 50, "seed": 3, "temperature": 0.0}
        plain = pair.generate(prompt, method="none", **options)
        got = pair.generate(prompt, method="model", **options)
        assert got.tokens == plain.tokens
        assert got.stats.accepted_tokens > 0
