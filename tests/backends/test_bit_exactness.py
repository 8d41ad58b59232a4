"""Find the classes of widths that agree bit for bit, and restrict a model to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp.matrices import FileMatrix
from edgespec.backends.llamacpp.model import LlamaCppModel, load
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.loading import bit_exactness
from edgespec.loading.bit_exactness import WidthClass, find_width_classes, restricted_to
from edgespec.loading.constants import SHORT_CONTEXT, WIDTHS_AGAIN
from edgespec.memory.constants import READ_TOKENS
from edgespec.model.base import LoadOptions, Progress, Snapshot
from edgespec.model.base_model import BaseModel
from edgespec.model.model_facts import Capabilities, ModelFacts
from tests.tables import table
from tests.tabular import TabularModel

_LAST_PLACE = np.float32(1e-6)
_ALL = tuple(range(1, 18))


class _RoundingModel(TabularModel):
    """A table model whose passes round in several ways. The errors reach later passes through the cache.

    Args:
        rounding: Returns how the row of a pass is rounded, given the width of the pass, the row, and whether
            the pass is a tree. Rows that are rounded differently differ in the last digit.
        prefill: Returns how a row of a prefill pass is rounded, given the width of the pass and the row.
    """

    def __init__(
        self,
        rounding: Callable[[int, int, bool], int] = lambda _width, _row, _tree: 0,
        prefill: Callable[[int, int], int] = lambda _width, _row: 0,
        context_tokens: int = 4096,
    ) -> None:
        super().__init__(table(3)._table, context_tokens=context_tokens)
        self._rounding, self._prefill = rounding, prefill
        # How the KV cells of each position were rounded.
        self._cells: list[int] = []
        self._open: list[int] = []

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        super().prefill(tokens, progress)
        self._cells = self._cells[: self.length - len(tokens)]
        self._cells += [self._prefill(len(tokens), row) for row in range(len(tokens))]

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        logits = super().verify(tree, first)
        self._cells = self._cells[: self.length]
        self._open = [self._rounding(tree.width, row, not tree.is_chain) for row in range(tree.width)]
        # Each row sees the cells of its ancestors, and its own.
        carried: list[int] = []
        for row, rounded in enumerate(self._open):
            before = sum(self._cells) if row == 0 else carried[tree.parents[row]]
            carried.append((before + rounded) % 97)
        everything = np.arange(logits.vocab_size)
        rows = [logits.at(row, everything) + _LAST_PLACE * each for row, each in enumerate(carried)]
        return HostLogits(np.stack(rows).astype(np.float32))

    def commit(self, path: tuple[int, ...]) -> None:
        super().commit(path)
        self._cells += [self._open[node] for node in (0, *path)]

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        copied = super().snapshot(start, end)
        return Snapshot(copied.length, bytes(self._cells[copied.start : copied.length]), copied.start)


def _widths(model: TabularModel) -> list[tuple[int, ...]]:
    return [found.widths for found in find_width_classes(model)]


def test_a_model_whose_passes_all_agree_has_one_class() -> None:
    (found,) = find_width_classes(_RoundingModel())
    assert found == WidthClass(_ALL, trees=True, block_tokens=1, is_complete=True)
    assert found.is_contiguous


@pytest.mark.parametrize("widest", [1, 2, 3, 5, 16])
def test_a_class_ends_where_another_kernel_begins(widest: int) -> None:
    found, *others = find_width_classes(_RoundingModel(lambda width, _row, _tree: width > widest))
    assert found.widths == tuple(range(1, widest + 1))
    assert found.trees == (widest >= 3)
    assert not found.is_complete
    # Width 2 is in another class only if it is not in that of width 1.
    assert [other.widths for other in others] == ([_ALL[1:]] if widest == 1 else [])


def test_a_class_may_have_gaps() -> None:
    assert _widths(_RoundingModel(lambda width, _row, _tree: width in (3, 4)))[0] == (1, 2, *range(5, 18))


def test_kernels_for_groups_of_four_rows_leave_only_narrower_passes() -> None:
    """llama.cpp has one kernel for groups of four rows of repacked weights, and another for the rest."""

    def rounding(width: int, row: int, _tree: bool) -> int:
        return row < width - width % 4

    assert _widths(_RoundingModel(rounding)) == [(1, 2, 3)]


def test_an_error_of_a_single_row_is_found() -> None:
    assert _widths(_RoundingModel(lambda width, row, _tree: width == 7 and row == 6)) == [
        (*range(1, 7), *range(8, 18))
    ]


def test_an_error_that_only_reaches_the_cache_is_found() -> None:
    """The logits of the pass itself are correct, but a later pass would carry the error."""

    class Silent(_RoundingModel):
        def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
            rounding, self._rounding = self._rounding, lambda *_: 0
            logits = super().verify(tree, first)
            self._rounding = rounding
            self._open = [rounding(tree.width, row, not tree.is_chain) for row in range(tree.width)]
            return logits

    assert _widths(Silent(lambda width, _row, _tree: width == 6))[0] == (*range(1, 6), *range(7, 18))


def test_an_error_only_in_long_contexts_is_found() -> None:
    model = _RoundingModel()
    model._rounding = lambda width, _row, _tree: width > 4 and model.length > 256
    assert _widths(model) == [(1, 2, 3, 4)]


def test_an_error_only_in_short_contexts_is_found() -> None:
    model = _RoundingModel()
    model._rounding = lambda width, _row, _tree: width > 4 and model.length < 256
    assert _widths(model) == [(1, 2, 3, 4)]


class _DeepModel(_RoundingModel):
    """A model that can run its first layers alone, where only `lower` rounds.

    Attributes:
        passes: For each pass, whether it ran the first layers alone, and its width.
    """

    def __init__(
        self, rounding: Callable[[int, int, bool], int], lower: Callable[[int, int, bool], int]
    ) -> None:
        super().__init__(rounding)
        self._all, self._lower = rounding, lower
        self._is_partial = False
        self.passes: list[tuple[bool, int]] = []

    def run_first_layers(self, enabled: bool) -> bool:
        self.truncate(0)
        self._is_partial = enabled
        self._rounding = self._lower if enabled else self._all
        return enabled

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self.passes.append((self._is_partial, tree.width))
        return super().verify(tree, first)


def test_a_model_that_can_run_its_first_layers_alone_runs_all_of_them_for_two_widths() -> None:
    model = _DeepModel(lambda *_: 0, lambda *_: 0)
    (found,) = find_width_classes(model)
    assert found == WidthClass(_ALL, trees=True, block_tokens=1, is_complete=True)
    assert [width for partial, width in model.passes if not partial and width > 1] == [2, 17]
    assert not model._is_partial
    assert model.length == 0


@pytest.mark.parametrize("lower_widest", [3, 17])
def test_a_difference_in_the_last_layers_is_found_too(lower_widest: int) -> None:
    model = _DeepModel(lambda width, _row, _tree: width > 5, lambda width, _row, _tree: width > lower_widest)
    (found,) = find_width_classes(model)
    assert found.widths == tuple(range(1, min(5, lower_widest) + 1))
    assert not found.is_complete


def test_slow_models_that_can_run_their_first_layers_alone_have_all_widths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a few widths run all layers. The widest pass is a separate class, and others are padded to it."""
    monkeypatch.setattr(bit_exactness, "SLOW_PASS_SECONDS", -1.0)

    def rounding(width: int, _row: int, _tree: bool) -> int:
        return width > 6

    model = _DeepModel(rounding, rounding)
    narrow, wide = find_width_classes(model)
    assert narrow.widths == (1, 2, 3, 4, 5, 6)
    assert wide.widths == (17,)
    assert {width for partial, width in model.passes if not partial} == {1, 2, 6, 17}
    # If a width does not agree over all layers, only the widths that do are kept.
    narrow, _ = find_width_classes(_DeepModel(lambda width, _row, _tree: width > 3, rounding))
    assert narrow.widths == (1, 2, 3)


def test_slow_models_that_run_all_layers_have_few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_exactness, "SLOW_PASS_SECONDS", -1.0)
    assert _widths(_RoundingModel()) == [(1, 2, 3, 4, 8, 16)]


def test_slow_models_are_tested_in_long_contexts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """This requires that they can repeat cached tokens. With f16, long contexts use another kernel."""
    monkeypatch.setattr(bit_exactness, "SLOW_PASS_SECONDS", -1.0)

    class Repeating(_RoundingModel):
        def repeat_cached(self, end: int) -> bool:
            self.prefill([0] * (end - self.length))
            return True

    model = Repeating()
    model._rounding = lambda width, _row, _tree: width > 4 and model.length > 512
    assert _widths(model)[0] == (1, 2, 3, 4)


class _Timed:
    """A clock that is advanced by a model's passes. Each of them takes a millisecond.

    Attributes:
        passes: The number of passes.
        tested: The widths of passes over chains after the long and the short context, as (is long, width).
    """

    def __init__(self, model: _RoundingModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self.tested: set[tuple[bool, int]] = set()
        verify = model.verify

        def timed(tree: TokenTree, first: int = 0) -> HostLogits:
            self.passes += 1
            if tree.is_chain and model.length >= SHORT_CONTEXT:
                self.tested.add((model.length > 256, tree.width))
            return verify(tree, first)

        monkeypatch.setattr(model, "verify", timed)
        monkeypatch.setattr(bit_exactness, "now", lambda: self.passes / 1000)
        monkeypatch.setattr(bit_exactness, "TRIAL_STEPS", 0)


@pytest.mark.parametrize("limit", [0.001, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3])
@pytest.mark.parametrize("deep", [False, True])
def test_when_time_runs_out_only_tested_widths_are_used(
    monkeypatch: pytest.MonkeyPatch, limit: float, deep: bool
) -> None:
    model = _DeepModel(lambda *_: 0, lambda *_: 0) if deep else _RoundingModel()
    timed = _Timed(model, monkeypatch)
    monkeypatch.setattr(bit_exactness, "TRIAL_SECONDS", limit)
    classes = find_width_classes(model)
    assert classes[0].widths == tuple(range(1, classes[0].max_width + 1))
    # A few passes over all layers follow, which none of the widths can be used without.
    assert timed.passes <= 1000 * limit + 20
    compared = {width for width in classes[0].widths if width in WIDTHS_AGAIN or not deep}
    for width in compared - {1}:
        assert {(True, width), (False, width)} <= timed.tested
    assert len(classes) == 1
    least, most = {0.001: (1, 1), 0.06: (1, 2), 0.3: (17, 17)}.get(limit, (2, 17))
    assert least <= classes[0].max_width <= most
    is_cut_short = classes[0].is_cut_short
    assert is_cut_short == {0.001: True, 0.06: True, 0.3: False}.get(limit, is_cut_short)
    reason = restricted_to(model.facts.capabilities, classes[0]).reason
    assert ("there was no time" in reason) == (is_cut_short and not classes[0].trees)


def test_widths_that_were_not_compared_before_time_ran_out_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the long context is finished, so a difference in the short one would not be found."""
    model = _RoundingModel()
    model._rounding = lambda width, _row, _tree: width > 4 and model.length < 256
    _Timed(model, monkeypatch)
    for limit in (0.05, 0.1, 0.12, 0.14, 0.16, 0.2, 0.5):
        monkeypatch.setattr(bit_exactness, "TRIAL_SECONDS", limit)
        for found in find_width_classes(model):
            assert found.max_width <= 4


def test_a_width_that_differs_is_not_called_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _RoundingModel(lambda width, _row, _tree: width)
    _Timed(model, monkeypatch)
    monkeypatch.setattr(bit_exactness, "TRIAL_SECONDS", 0.1)
    found, *_ = find_width_classes(model)
    assert (found.widths, found.is_cut_short) == ((1,), False)
    assert "does not give" in restricted_to(model.facts.capabilities, found).reason


def test_a_class_without_width_1_is_not_used_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _RoundingModel(lambda width, _row, _tree: width > 1)
    _Timed(model, monkeypatch)
    monkeypatch.setattr(bit_exactness, "TRIAL_SECONDS", 0.06)
    assert _widths(model) == [(1,)]


def test_without_any_agreement_in_the_last_layers_there_are_no_trees() -> None:
    found, *_ = find_width_classes(_DeepModel(lambda width, _row, _tree: width, lambda *_: 0))
    assert (found.widths, found.trees) == ((1,), False)


def test_a_cancelled_trial_leaves_all_layers_running() -> None:
    model = _DeepModel(lambda *_: 0, lambda *_: 0)
    with pytest.raises(CancelledError):
        find_width_classes(model, lambda _text, _fraction: len(model.passes) < 20)
    assert not model._is_partial


def test_the_first_layers_of_a_real_model_run_alone(smollm2: Path) -> None:
    """Their hidden states and the output layer's results for them replace the logits.

    The cells of the other layers stay empty.
    """
    model = load(str(smollm2), "smollm2", LoadOptions(context_tokens=256, threads=1))
    tokens, everything = list(range(1000, 1012)), np.arange(model.facts.vocab_size)

    def rows() -> list[Any]:
        model.prefill(tokens[:8])
        logits = model.verify(TokenTree.chain(tokens[8], tokens[9:]))
        found = [logits.at(row, np.arange(logits.vocab_size)) for row in range(4)]
        model.commit((1, 2, 3))
        return found

    try:
        before = rows()
        whole = bytes(model.snapshot(0, 12).data)
        assert model.run_first_layers(True)
        assert model.length == 0
        states = rows()
        assert {row.shape for row in states} == {(576 + len(everything),)}
        weights = FileMatrix(smollm2, "output.weight", "token_embd.weight").rows(range(64))
        for row in states:
            np.testing.assert_allclose(row[576 : 576 + 64], weights @ row[:576], rtol=0.1, atol=0.5)
        cells = bytes(model.snapshot(0, 12).data)
        assert len(cells) == len(whole)
        assert cells.count(0) > len(cells) * 3 // 4 > whole.count(0)
        assert not model.run_first_layers(False)
        assert model.length == 0
        after = rows()
    finally:
        model.close()
    assert len(after[0]) == len(everything)
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_small_model_runs_all_layers(demo_draft: Path) -> None:
    model = load(str(demo_draft), "demo", LoadOptions(context_tokens=64, threads=1))
    try:
        assert not model.run_first_layers(True)
        assert model.verify(TokenTree.chain(1)).vocab_size == model.facts.vocab_size
    finally:
        model.close()


def test_trees_that_round_differently_are_found() -> None:
    (found,) = find_width_classes(_RoundingModel(lambda _width, _row, tree: tree))
    assert found.widths == _ALL
    assert not found.trees


def test_a_device_that_never_repeats_itself_has_no_class_of_several_widths() -> None:
    random = np.random.default_rng(0)
    assert _widths(_RoundingModel(lambda *_: int(random.integers(50)))) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("prefill", "block"),
    [
        (lambda _width, _row: 0, 1),
        (lambda width, row: row < width - width % 4, 16),
        (lambda width, _row: width, READ_TOKENS),
    ],
)
def test_the_blocks_in_which_prompts_must_be_read_are_found(
    prefill: Callable[[int, int], int], block: int
) -> None:
    assert find_width_classes(_RoundingModel(prefill=prefill))[0].block_tokens == block


@pytest.mark.parametrize(
    ("differing", "prefill_differing", "classes"),
    [
        ({3, 4}, {3, 4}, [((1, 2, *range(5, 18)), 16)]),
        ({3, 4}, set(), [((1, 2, *range(5, 18)), 1)]),
        ({8}, {8}, [(_ALL[:7], 16)]),
        ({1}, {1}, [((1,), 16), (_ALL[1:], 16)]),
        ({1}, set(), [((1,), 16), (_ALL[1:], 1)]),
        (set(range(9, 18)), {9, 11}, [(_ALL[:8], 16)]),
    ],
)
def test_passes_over_prompts_are_not_padded(
    differing: set[int], prefill_differing: set[int], classes: list[tuple[tuple[int, ...], int]]
) -> None:
    """A prompt with, say, one more token than is cached takes a pass over one token."""
    model = _RoundingModel(
        lambda width, _row, _tree: width in differing, lambda width, _row: width in prefill_differing
    )
    found = find_width_classes(model)
    assert [(each.widths, each.block_tokens) for each in found] == classes


@pytest.mark.parametrize("context_tokens", [64, 256, 320])
def test_small_contexts_are_tested_to_their_end(context_tokens: int) -> None:
    assert _widths(_RoundingModel(context_tokens=context_tokens)) == [_ALL]


def test_a_tiny_context_has_only_single_tokens() -> None:
    assert _widths(_RoundingModel(context_tokens=20)) == [(1,)]


def test_the_cache_is_empty_afterwards_and_progress_can_cancel() -> None:
    model = _RoundingModel()
    find_width_classes(model)
    assert model.length == 0
    with pytest.raises(CancelledError):
        find_width_classes(model, lambda _what, _fraction: False)
    assert model.length == 0


def test_models_without_rollback_have_only_single_tokens() -> None:
    assert _widths(table(3, rollback=False)) == [(1,)]


_ABLE = Capabilities(True, True, max_width=256, self_draft_methods=frozenset({"lowbit", "layerskip"}))


def test_a_class_without_gaps_limits_the_width() -> None:
    now = restricted_to(_ABLE, WidthClass((1, 2, 3), True, 16))
    assert now.exact
    assert now.tree
    assert (now.max_width, now.pass_widths, now.reuse_block_tokens) == (3, (), 16)
    assert now.self_draft_methods == _ABLE.self_draft_methods


def test_a_class_with_gaps_pads_passes_and_refuses_early_exits_with_the_reason() -> None:
    now = restricted_to(_ABLE, WidthClass((2, 3, 6), False, 1))
    assert not now.tree
    assert [now.padded_width(width) for width in range(1, 7)] == [2, 2, 3, 6, 6, 6]
    assert now.padding_tokens == 2
    assert now.self_draft_methods == {"lowbit"}
    assert "2 to 3, 6" in now.self_draft_refusals["layerskip"]


@pytest.mark.parametrize(
    ("able", "found"),
    [
        (_ABLE, WidthClass((1,))),
        # A model that rolls back by running tokens again does so in passes of any width.
        (Capabilities(True, False, partial_truncate=False), WidthClass((1, 2, 3), block_tokens=16)),
    ],
)
def test_without_other_widths_a_model_cannot_draft(able: Capabilities, found: WidthClass) -> None:
    now = restricted_to(able, found)
    assert (now.rollback, now.tree, now.max_width) == (False, False, 1)
    assert now.reason
    assert not now.self_draft_methods
    assert set(now.self_draft_refusals) == able.self_draft_methods


@pytest.mark.long
def test_passes_between_two_members_are_padded(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded pass gives the bits of the wider pass, and keeps only the requested cells."""
    model = load(str(smollm2), "smollm2", LoadOptions(context_tokens=256, threads=1))
    assert isinstance(model, LlamaCppModel)
    everything = np.arange(model.facts.vocab_size)
    tokens = list(range(1000, 1040))
    try:
        model.facts = _with_capabilities(model, restricted_to(model.facts.capabilities, WidthClass((4,))))
        assert model.free_tokens == 256 - 3
        run = model.context.run
        widths: list[int] = []

        def noted(inputs: Any, *rest: Any) -> Any:
            widths.append(len(inputs))
            return run(inputs, *rest)

        monkeypatch.setattr(model.context, "run", noted)
        model.prefill(tokens[:20])
        rows = []
        for first, count in ((20, 1), (21, 2), (23, 4), (27, 3)):
            logits = model.verify(TokenTree.chain(tokens[first], tokens[first + 1 : first + count]))
            rows += [logits.at(row, everything) for row in range(count)]
            model.commit(tuple(range(1, count)))
        assert model.length == 30
        assert set(widths) == {4}
        model.truncate(20)
        for first in (20, 24):
            logits = model.verify(TokenTree.chain(tokens[first], tokens[first + 1 : first + 4]))
            for row in range(4):
                np.testing.assert_array_equal(logits.at(row, everything), rows[first - 20 + row])
            model.commit((1, 2, 3))
    finally:
        model.close()


def _with_capabilities(model: LlamaCppModel, capabilities: Capabilities) -> ModelFacts:
    return replace(model.facts, capabilities=capabilities)


@pytest.mark.real
@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize(
    "name",
    ["smollm2-q4_0", "smollm2-q4_1", "smollm2-q4_k_m", "smollm2-q8_0", "smollm2-f16", "gemma3-270m-q4_k_m"],
)
def test_the_first_layers_of_real_models_have_the_classes_of_all_layers(
    real_models: Path, monkeypatch: pytest.MonkeyPatch, name: str, repack: bool
) -> None:
    file = real_models / f"{name}.gguf"
    # Test all widths, even if other programs make the passes slow.
    monkeypatch.setattr(bit_exactness, "TRIAL_SECONDS", float("inf"))
    monkeypatch.setattr(bit_exactness, "MAX_SHARE_OF_SINGLE_PASSES", float("inf"))
    model = load(str(file), name, LoadOptions(context_tokens=2048, repack=repack, exact=True))
    try:
        first = find_width_classes(model)
        monkeypatch.setattr(LlamaCppModel, "run_first_layers", BaseModel.run_first_layers)
        assert [found.widths for found in find_width_classes(model)] == [found.widths for found in first]
    finally:
        model.close()
