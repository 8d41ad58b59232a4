"""Finding bit-exact passes by trial, and restricting a model to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.bit_exactness import BitExactPasses, find_bit_exact_passes, restricted_to
from edgespec.backends.model_facts import Capabilities
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from tests.tables import table
from tests.tabular import TabularModel

_LAST_PLACE = np.float32(1e-6)


class _RoundingModel(TabularModel):
    """A table that rounds differently in passes wider than `width`, with branches, or after many prefills.

    Args:
        width: Widest exact pass.
        branches: Trees are exact.
        reads: The batches of a prefill make no difference.
    """

    def __init__(self, *, width: int = 99, branches: bool = True, reads: bool = True) -> None:
        super().__init__(table(3)._table)
        self._width, self._branches, self._reads = width, branches, reads
        self._passes = 0

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length == 0:
            self._passes = 0

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        super().prefill(tokens, progress)
        self._passes += 1

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        logits = super().verify(tree, first)
        rows = np.stack([logits.at(row, np.arange(logits.vocab_size)) for row in range(len(logits))])
        wide = tree.width > self._width or (not tree.is_chain and not self._branches)
        if wide or (not self._reads and self._passes > 3):
            rows = rows + _LAST_PLACE
        return HostLogits(rows.astype(np.float32))


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_the_widest_exact_pass_is_found(width: int) -> None:
    found = find_bit_exact_passes(_RoundingModel(width=width))
    assert (found.max_width, found.trees) == (width, width > 3)
    # Where every wider pass rounds otherwise, what is cached may hide it from a trial.
    assert found.prefill == (width > 1)


def test_an_exact_model_is_found_exact() -> None:
    assert find_bit_exact_passes(_RoundingModel()) == BitExactPasses(17, True, True)


def test_inexact_branches_are_found() -> None:
    assert find_bit_exact_passes(_RoundingModel(branches=False)) == BitExactPasses(17, False, True)


def test_inexact_prefill_is_found() -> None:
    assert not find_bit_exact_passes(_RoundingModel(reads=False)).prefill


def test_a_pass_that_is_inexact_only_in_long_contexts_is_found() -> None:
    class Late(_RoundingModel):
        def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
            self._width = 4 if self.length > 256 else 99
            return super().verify(tree, first)

    assert find_bit_exact_passes(Late()).max_width == 4


def test_rare_rounding_differences_are_found() -> None:
    """As llama.cpp's passes of 8 rows and more do for IQ4_NL weights."""

    class Rare(_RoundingModel):
        odd = False

        def _note(self, count: int) -> None:
            after = self.length % 50
            self.odd = self.length > 0 and (self.odd or (count < 8 and after < 25 <= after + count))

        def truncate(self, length: int) -> None:
            super().truncate(length)
            self._note(99)

        def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
            self._note(len(tokens))
            super().prefill(tokens, progress)

        def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
            self._width = 0 if self.odd else 99
            logits = super().verify(tree, first)
            self._note(tree.width)
            return logits

    found = find_bit_exact_passes(Rare())
    assert found.max_width < 8
    assert not found.prefill


@pytest.mark.parametrize("context_tokens", [64, 256, 320])
def test_small_contexts_are_tested_to_their_end(context_tokens: int) -> None:
    assert find_bit_exact_passes(table(3, context_tokens=context_tokens)) == BitExactPasses(17, True, True)


def test_the_cache_is_empty_afterwards_and_progress_can_cancel() -> None:
    model = _RoundingModel()
    find_bit_exact_passes(model)
    assert model.length == 0
    with pytest.raises(CancelledError):
        find_bit_exact_passes(model, lambda _what, _fraction: False)
    assert model.length == 0


def test_a_tiny_context_gives_no_exact_passes() -> None:
    assert find_bit_exact_passes(table(3, context_tokens=20)) == BitExactPasses(1, False, False)


_ABLE = Capabilities(True, True, max_width=256, self_draft_methods=frozenset({"lowbit"}))


@pytest.mark.parametrize(
    ("able", "found", "held"),
    [
        (_ABLE, BitExactPasses(17, True, True), (True, True, 17, True, {"lowbit"})),
        (_ABLE, BitExactPasses(7, False, False), (True, False, 7, False, set())),
        # What is run again to go back must not ride in the pass of a step.
        (_ABLE, BitExactPasses(1, False, True), (False, False, 1, True, set())),
        # What runs tokens again to go back does so in passes of any width.
        (
            Capabilities(True, False, partial_truncate=False),
            BitExactPasses(5, False, False),
            (False, False, 1, False, set()),
        ),
        (
            Capabilities(False, False, "why"),
            BitExactPasses(1, False, True),
            (False, False, 1 << 20, True, set()),
        ),
    ],
)
def test_capabilities_are_restricted_to_exact_passes(
    able: Capabilities, found: BitExactPasses, held: tuple[bool, bool, int, bool, set[str]]
) -> None:
    now = restricted_to(able, found)
    assert now.exact
    assert (
        now.rollback,
        now.tree,
        now.max_width,
        now.prefix_reuse_exact,
        set(now.self_draft_methods),
    ) == held
    assert now.rollback or now.reason


def _found(target: Path | str, **options: Any) -> BitExactPasses:
    with edgespec.load(
        str(target), "none", method="none", prefix_cache="none", context=512, **options
    ) as runtime:
        model: LanguageModel
        with runtime.borrowed_target() as model:
            return find_bit_exact_passes(model)


@pytest.mark.long
def test_llama_cpp_has_one_kernel_for_bf16_values_and_several_for_f16() -> None:
    """What the README says of caches, as this processor computes it."""
    assert _found("demo", kv_type="f16/bf16").prefill
    assert not _found("demo", kv_type="f16").prefill
