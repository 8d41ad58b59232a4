"""Rollback by checkpoints and replay leaves the cache as after a fresh prefill, at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.replay import MAX_CHECKPOINTS, ReplayModel
from edgespec.engine.noise import Noise
from edgespec.engine.processors import build_processors
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError
from edgespec.model.base import Snapshot
from tests.backends.rewindable import StateModel, replayed_table
from tests.tabular import TabularModel

EVERY_TOKEN = np.arange(11)


class Act(NamedTuple):
    what: str
    size: int
    keep: int
    seed: int
    cancel: bool


acts = st.lists(
    st.builds(
        Act,
        st.sampled_from(
            ["draft"] * 4 + ["grow"] * 2 + ["step", "give up", "truncate", "prefill", "snapshot", "restore"]
        ),
        st.integers(1, 12),
        st.integers(0, 11),
        st.integers(0, 10_000),
        st.sampled_from([False] * 7 + [True]),
    ),
    max_size=25,
)


def row_after(tokens: Sequence[int]) -> list[float]:
    """Return the logits after `tokens`, from a table model with all capabilities."""
    plain = TabularModel(StateModel()._table)
    plain.prefill(tokens[:-1])
    return plain.verify(TokenTree.chain(tokens[-1])).at(0, EVERY_TOKEN).tolist()  # type: ignore[no-any-return]


def some(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 11, count).tolist()  # type: ignore[no-any-return]


class History:
    """A ReplayModel, and what must be in it."""

    def __init__(self, inner: StateModel) -> None:
        self.inner, self.model = inner, replayed_table(inner)
        self.kept: list[int] = []
        self.saved: tuple[Snapshot, list[int]] = (self.model.snapshot(), [])

    def do(self, act: Act) -> None:
        self.inner.stop_after = act.seed % 3 if act.cancel else None
        before = list(self.kept)
        try:
            getattr(self, act.what.replace(" ", "_"))(act, some(act.size, act.seed))
        except CancelledError:
            assert act.cancel
            self.kept = self.kept[: self.model.length]
            lost = self.inner.reach < 1000 or act.what in ("restore", "truncate")
            assert lost or self.kept[: len(before)] == before
        self.inner.stop_after = None
        assert self.model.length == len(self.kept)
        assert self.model.free_tokens == self.model.facts.context_tokens - len(self.kept)
        assert len(self.model._checkpoints) <= MAX_CHECKPOINTS

    def draft(self, act: Act, tokens: list[int]) -> None:
        if len(tokens) > self.model.free_tokens:
            with pytest.raises(ContextFullError):
                self.model.verify(TokenTree.chain(tokens[0], tokens[1:]))
            return
        logits = self.model.verify(TokenTree.chain(tokens[0], tokens[1:]))
        assert len(logits) == len(tokens)
        for row in range(len(tokens)):
            assert logits.at(row, EVERY_TOKEN).tolist() == row_after(self.kept + tokens[: row + 1])
        self.commit(act, tokens)

    def commit(self, act: Act, tokens: list[int]) -> None:
        kept = 1 + act.keep % len(tokens)
        try:
            self.model.commit(tuple(range(1, kept)))
        except BackendError:
            # The tokens of a snapshot are unknown, so they cannot be rerun.
            assert self.inner.reach < 1000
            assert self.saved
            self.kept = []
        else:
            self.kept += tokens[:kept]

    def grow(self, act: Act, tokens: list[int]) -> None:
        if len(tokens) > self.model.free_tokens:
            return
        first = 0
        for end in sorted({1 + act.seed % len(tokens), *range(act.seed % 3 + 1, len(tokens)), len(tokens)}):
            logits = self.model.verify(TokenTree.chain(tokens[0], tokens[1:end]), first)
            assert len(logits) == end - first
            assert logits.at(end - first - 1, EVERY_TOKEN).tolist() == row_after(self.kept + tokens[:end])
            first = end
        self.commit(act, tokens)

    def step(self, act: Act, tokens: list[int]) -> None:
        for token in tokens:
            self.draft(act, [token])

    def give_up(self, act: Act, tokens: list[int]) -> None:
        if len(tokens) <= self.model.free_tokens:
            self.model.verify(TokenTree.chain(tokens[0], tokens[1:]))
        self.model.truncate(len(self.kept))
        if self.inner.reach < 1000:  # The tokens of a snapshot are not known, so they cannot be run again.
            self.kept = self.kept[: self.model.length]

    def truncate(self, act: Act, tokens: list[int]) -> None:
        length = max(0, len(self.kept) - act.seed % 40)
        self.model.truncate(length)
        assert self.model.length <= length
        self.kept = self.kept[: self.model.length]

    def prefill(self, act: Act, tokens: list[int]) -> None:
        more = some(act.size * 5, act.seed)
        if len(more) <= self.model.free_tokens:
            wanted = self.kept + more
            try:
                self.model.prefill(more)
            finally:
                self.kept = wanted[: self.model.length]

    def snapshot(self, act: Act, tokens: list[int]) -> None:
        self.saved = (self.model.snapshot(), list(self.kept))

    def restore(self, act: Act, tokens: list[int]) -> None:
        self.model.restore(self.saved[0])
        self.kept = list(self.saved[1])


@settings(max_examples=120)
@given(acts, st.sampled_from([0, 0, 3]), st.sampled_from([1 << 30, 1 << 30, 10]))
def test_any_history_equals_a_fresh_prefill(history: list[Act], undo: int, reach: int) -> None:
    done = History(StateModel(context_tokens=150, undo=undo, reach=reach))
    for act in history:
        done.do(act)
    if done.model.free_tokens:
        logits = done.model.verify(TokenTree.chain(4))
        assert logits.at(0, EVERY_TOKEN).tolist() == row_after([*done.kept, 4])


def rejecting(model: ReplayModel, rounds: int, width: int = 4) -> None:
    for _ in range(rounds):
        model.verify(TokenTree.chain(1, [2] * (width - 1)))
        model.commit(())


class TestCosts:
    def test_plain_decoding_takes_regular_checkpoints(self) -> None:
        inner = StateModel(context_tokens=2000)
        model = replayed_table(inner)
        model.prefill(some(30, 0))
        for token in some(1000, 1):
            model.verify(TokenTree.chain(token))
            model.commit(())
        assert inner.checkpoints <= 1 + 1000 // 128
        assert inner.rows_run == 1030

    def test_a_rejection_needs_no_extra_pass(self) -> None:
        inner = StateModel()
        model = replayed_table(inner)
        model.prefill([1, 2, 3])
        model.verify(TokenTree.chain(4, [5, 6, 7]))
        model.commit((1,))
        assert inner.length == 3
        model.verify(TokenTree.chain(8, [9]))
        assert inner.rows_run == 3 + 4 + (2 + 2)

    def test_constant_rejection_needs_few_extra_passes(self) -> None:
        inner = StateModel()
        model = replayed_table(inner)
        model.prefill([1, 2, 3])
        rejecting(model, 90)
        assert inner.rows_run <= 3 + 90 * (4 + 8) + 90
        assert inner.checkpoints <= 1 + 90 / 8

    def test_undo_tokens_need_no_checkpoint(self) -> None:
        inner = StateModel(undo=3)
        model = replayed_table(inner)
        model.prefill([1, 2, 3])
        rejecting(model, 100)
        assert inner.checkpoints == 1
        assert inner.rows_run == 3 + 400
        rejecting(model, 1, width=5)
        assert inner.checkpoints == 2

    def test_a_long_prefill_keeps_the_maximum_of_checkpoints(self) -> None:
        inner = StateModel(context_tokens=20_000)
        model = replayed_table(inner)
        model.prefill([1] * 16_000)
        assert len(model._checkpoints) == MAX_CHECKPOINTS
        model.truncate(8000)
        assert 3000 <= model.length <= 8000

    def test_the_checkpoint_after_the_prompt_survives_a_long_reply(self) -> None:
        model = replayed_table(StateModel(context_tokens=2000))
        model.prefill(some(300, 0))
        for _ in range(400):
            model.verify(TokenTree.chain(1, [2, 3]))
            model.commit((1,))
        model.truncate(300)
        assert model.length == 300


def test_a_cancelled_prefill_keeps_tokens_up_to_a_checkpoint() -> None:
    inner = StateModel(context_tokens=5000)
    model = replayed_table(inner)
    model.prefill([1, 2, 3])
    inner.stop_after = 2
    with pytest.raises(CancelledError):
        model.prefill([4] * 4000)
    assert model.length == 3 + 2048
    with pytest.raises(CancelledError):
        model.prefill([4] * 100, lambda what, fraction: False)
    assert model.length == 3 + 2048


def test_progress_reaches_one_in_a_long_prefill() -> None:
    seen: list[float] = []

    def watch(what: str, fraction: float) -> bool:
        seen.append(fraction)
        return True

    replayed_table(StateModel(context_tokens=5000)).prefill([1] * 4000, watch)
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert seen[-1] == 1.0


def test_an_invalid_snapshot_leaves_an_empty_cache() -> None:
    model = replayed_table()
    model.prefill([1, 2, 3])
    snapshot = model.snapshot()
    with pytest.raises(BackendError):
        model.restore(type(snapshot)(3, b"nonsense"))
    assert model.length == 0
    model.prefill([1, 2])
    assert model.verify(TokenTree.chain(3)).at(0, EVERY_TOKEN).tolist() == row_after([1, 2, 3])


def test_branches_raise_and_change_nothing() -> None:
    model = replayed_table()
    model.prefill([1, 2, 3])
    assert not model.facts.capabilities.tree
    assert model.facts.capabilities.reason
    with pytest.raises(CapabilityError):
        model.verify(TokenTree((1, 2, 3), (-1, 0, 0), (None,) * 3))
    assert model.length == 3
    assert model.verify(TokenTree.chain(3)).at(0, EVERY_TOKEN).tolist() == row_after([1, 2, 3, 3])


def test_logits_after_replayed_rows_are_complete() -> None:
    model, plain = replayed_table(), TabularModel(StateModel()._table)
    for each in (model, plain):
        each.prefill([1, 2, 3])
        each.verify(TokenTree.chain(4, [5, 6, 7]))
        each.commit((1,))
    got, expected = (each.verify(TokenTree.chain(8, [9, 1])) for each in (model, plain))
    assert len(got) == len(expected) == 3
    assert got.vocab_size == expected.vocab_size
    for row in range(3):
        for a, b in ((got, expected), (got.limit_vocab(7), expected.limit_vocab(7))):
            for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=5)):
                processors, noise = build_processors(params, []), params.temperature and Noise(1, 40 + row)
                assert a.best(row, 3, processors, noise or None) == b.best(row, 3, processors, noise or None)
            for found, wanted in ((a.top(row, 4), b.top(row, 4)), (a.above(row, 1.0), b.above(row, 1.0))):
                assert [x.tolist() for x in found] == [x.tolist() for x in wanted]
    assert got.limit_vocab(7).vocab_size == 7
    assert got.waited_seconds == 0.0
