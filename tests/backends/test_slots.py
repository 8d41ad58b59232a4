"""Several replies in one llama.cpp context, each in its own slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.model import load_slots
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    MemoryBudgetError,
    OptionError,
    OutOfMemoryError,
)
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions
from tests.backends.contract import TREES, Rows, fresh, path_to, step, tokens_for, tokens_to, tree_of
from tests.backends.tiny_models import write_gemma2, write_llama, write_mamba
from tests.raising import raises

SLOTS, CONTEXT = 3, 512
# Attention adds up a text's cells in memory order, which depends on the other replies.
ROUNDING = 5e-2

Round = tuple[tuple[int, ...], int, int, str]
ROUNDS: st.SearchStrategy[list[Round]] = st.lists(
    st.tuples(
        st.sampled_from(list(TREES.values())),
        st.integers(0, 11),
        st.integers(0, 10_000),
        st.sampled_from(["commit", "commit", "commit", "give up", "truncate", "prefill", "restore"]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module", params=["full attention", "sliding window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    return write_llama(path, layers=2) if request.param == "full attention" else write_gemma2(path)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[LanguageModel]:
    model = llamacpp.load(str(tiny), "tiny", LoadOptions(context_tokens=CONTEXT))
    yield model
    model.close()


@pytest.fixture(scope="module")
def all_slots(tiny: Path) -> Iterator[Sequence[LanguageModel]]:
    models = load_slots(str(tiny), "tiny", LoadOptions(context_tokens=CONTEXT, parallel=SLOTS))
    yield models
    for model in models:
        model.close()


@pytest.fixture
def slots(all_slots: Sequence[LanguageModel]) -> Sequence[LanguageModel]:
    for model in all_slots:
        model.interrupt(False)
        model.truncate(0)
    return all_slots


def follow(model: LanguageModel, history: list[Round], seed: int) -> tuple[list[int], Rows]:
    """Run a history of rounds. Return the tokens in the cache, and the logits after a last one."""
    model.truncate(0)
    kept = tokens_for(model, 20 + seed, seed)
    model.prefill(kept)
    saved = model.snapshot(), list(kept)
    for shape, pick, tree_seed, what in history:
        tree = tree_of(model, shape, tree_seed)
        if what == "truncate":
            del kept[max(1, len(kept) - pick) :]
            model.truncate(len(kept))
        elif what == "restore":
            model.restore(saved[0])
            kept = list(saved[1])
        elif what == "prefill":
            model.prefill(tree.tokens)
            kept += tree.tokens
        else:
            model.verify(tree)
            if what == "commit":
                node = pick % tree.width
                model.commit(path_to(tree, node))
                kept += tokens_to(tree, node)
    assert model.length == len(kept)
    return kept, step(model, 4)


def check(slots: Sequence[LanguageModel], alone: LanguageModel, histories: Sequence[list[Round]]) -> None:
    with ThreadPoolExecutor(SLOTS) as pool:
        results = list(pool.map(follow, slots, histories, range(SLOTS)))
    for kept, row in results:
        np.testing.assert_allclose(row, fresh(alone, [*kept, 4]), rtol=0, atol=ROUNDING)


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=SLOTS, max_size=SLOTS))
def test_slots_equal_separate_contexts(
    slots: Sequence[LanguageModel], alone: LanguageModel, histories: list[list[Round]]
) -> None:
    check(slots, alone, histories)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=SLOTS, max_size=SLOTS))
def test_slots_equal_separate_contexts_in_many_histories(
    slots: Sequence[LanguageModel], alone: LanguageModel, histories: list[list[Round]]
) -> None:
    check(slots, alone, histories)


@pytest.mark.long
def test_passes_are_shared(demo_target: Path) -> None:
    # The tiny model's passes are too short for the passes of several threads to coincide.
    models = load_slots(str(demo_target), "demo", LoadOptions(context_tokens=256, parallel=SLOTS))
    others: list[int] = []

    def generate(model: LanguageModel) -> None:
        model.prefill(tokens_for(model, 30))
        for _ in range(40):
            others.append(model.verify(TokenTree.chain(5, [6, 7])).other_tokens)
            model.commit((1,))

    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(generate, models))
    for model in models:
        model.close()
    assert sum(count > 0 for count in others) > len(others) / 2


@pytest.mark.long
def test_a_long_prompt_does_not_stall_the_others(slots: Sequence[LanguageModel]) -> None:
    others: list[int] = []
    stop = threading.Event()

    def generate() -> None:
        slots[0].prefill(tokens_for(slots[0], 30))
        while not stop.is_set():
            others.append(slots[0].verify(TokenTree.chain(5)).other_tokens)

    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(generate)
        try:
            while len(others) < 3:
                stop.wait(0.001)
            for _ in range(20):
                slots[1].truncate(0)
                slots[1].prefill(tokens_for(slots[1], 400))
        finally:
            stop.set()
        generating.result()
    assert 0 < max(others) <= 64


def test_a_full_context_fails_only_its_own_reply(
    slots: Sequence[LanguageModel], alone: LanguageModel
) -> None:
    full, other = slots[:2]
    full.prefill(tokens_for(full, CONTEXT - 2))
    other.prefill(tokens_for(other, 40, 1))
    with pytest.raises(ContextFullError):
        full.verify(TokenTree.chain(1, [2, 3]))
    with pytest.raises(ContextFullError):
        full.prefill([1, 2, 3])
    assert full.length == CONTEXT - 2
    row = step(other, 4)
    np.testing.assert_allclose(row, fresh(alone, [*tokens_for(other, 40, 1), 4]), rtol=0, atol=ROUNDING)
    # All slots together can be full.
    for model in slots:
        model.truncate(0)
        model.prefill(tokens_for(model, CONTEXT - 8))
        model.verify(tree_of(model, TREES["binary"]))
        model.commit((2, 6))
        assert model.length == CONTEXT - 5


def test_a_failed_pass_is_repeated_for_each_reply(
    slots: Sequence[LanguageModel], alone: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes = LlamaContext.run, []

    def run_few(self: LlamaContext, tokens: Sequence[int], *args: Any) -> Any:
        sizes.append(len(tokens))
        if len(tokens) > 1:
            raise OutOfMemoryError("the buffers cannot be allocated")
        return run(self, tokens, *args)

    for slot, model in enumerate(slots):
        model.prefill(tokens_for(model, 30, slot))
    monkeypatch.setattr(LlamaContext, "run", run_few)
    with ThreadPoolExecutor(SLOTS) as pool:
        rows = list(pool.map(lambda model: [step(model, token) for token in (4, 5, 6)], slots))
        with pytest.raises(OutOfMemoryError):
            slots[0].verify(TokenTree.chain(4, [5]))
    monkeypatch.undo()
    assert max(sizes) > 1
    for slot, row in enumerate(rows):
        expected = fresh(alone, [*tokens_for(alone, 30, slot), 4, 5, 6])
        np.testing.assert_allclose(row[-1], expected, rtol=0, atol=ROUNDING)


def test_a_cancelled_reply_does_not_disturb_the_others(
    slots: Sequence[LanguageModel], alone: LanguageModel
) -> None:
    tokens = tokens_for(alone, 400, 3)
    stop = threading.Event()

    def cancelled() -> int:
        count = 0
        while not stop.is_set():
            try:
                slots[1].truncate(0)
                slots[1].prefill(tokens)
            except CancelledError:
                count += 1
        return count

    def cancel() -> None:
        while not stop.wait(0.003):
            slots[1].interrupt(True)
            stop.wait(0.001)
            slots[1].interrupt(False)

    with ThreadPoolExecutor(3) as pool:
        counted, cancelling = pool.submit(cancelled), pool.submit(cancel)
        try:
            rows = [follow(slots[0], [(TREES["binary"], 5, seed, "commit")] * 5, seed) for seed in range(20)]
        finally:
            stop.set()
        cancelling.result()
        assert counted.result() > 0
    for kept, row in rows:
        np.testing.assert_allclose(row, fresh(alone, [*kept, 4]), rtol=0, atol=ROUNDING)


def test_closing_a_slot_keeps_the_others_usable(tiny: Path) -> None:
    first, second = load_slots(str(tiny), "tiny", LoadOptions(context_tokens=256, parallel=2))
    first.close()
    first.close()
    with pytest.raises(ClosedError):
        first.prefill([1])
    second.prefill([5, 6, 7])
    assert second.vocabulary.size
    second.close()
    with pytest.raises(ClosedError):
        second.verify(TokenTree.chain(0))


def test_a_shared_context_cannot_grow(slots: Sequence[LanguageModel]) -> None:
    slots[0].resize(CONTEXT // 2)
    assert slots[0].facts.context_tokens == CONTEXT
    with raises(MemoryBudgetError, code="context_fixed"):
        slots[0].resize(CONTEXT + 1)
    with raises(CapabilityError, "omit --parallel", code="parallel_not_supported"):
        slots[0].self_draft(EarlyExit(1))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_mamba, "recurrent layers"),
        (lambda path: write_llama(path, long_from=128), "LongRoPE"),
    ],
)
def test_models_that_cannot_share_passes(write: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    with raises(CapabilityError, reason, code="parallel_not_supported"):
        load_slots(str(write(tmp_path / "model.gguf")), "it", LoadOptions(context_tokens=256, parallel=2))


def test_too_many_branches_for_the_slots(tiny: Path) -> None:
    with raises(OptionError, option="draft_branches"):
        load_slots(str(tiny), "tiny", LoadOptions(context_tokens=256, parallel=20, max_branches=16))
