"""Compare the attention kernels of a loaded model with those of other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.model import load
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.loading import attention_speed
from edgespec.loading.attention_speed import AttentionSpeed, compare_attention
from edgespec.loading.constants import LONGEST_CONTEXT
from edgespec.model.base import LoadOptions, Progress
from tests.tables import table
from tests.tabular import TabularModel

_OWN, _OTHER = LoadOptions(exact=True), LoadOptions(exact=False)


class _TwoKernels(TabularModel):
    """A table model with two kinds of attention kernels, whose passes take time on a simulated clock.

    Args:
        steps: Durations of a single-token pass, one for each kind of kernels, in a long context.
        prompts: Durations of reading a prompt.
        delays: Additional durations of the first passes, as other programs would cause them.
    """

    def __init__(
        self, steps: dict[bool, float], prompts: dict[bool, float], delays: Sequence[float] = ()
    ) -> None:
        super().__init__(table(3)._table, context_tokens=4096)
        self.steps, self.prompts, self.delays = steps, prompts, list(delays)
        self.time, self.is_exact, self.is_partial = 0.0, True, False

    def clock(self) -> float:
        return self.time

    def use_attention(self, options: LoadOptions) -> bool:
        self.truncate(0)
        is_changed = options.exact != self.is_exact
        self.is_exact = options.exact
        return is_changed

    def run_first_layers(self, enabled: bool) -> bool:
        self.truncate(0)
        self.is_partial = enabled
        return enabled

    def repeat_cached(self, end: int) -> bool:
        super().prefill([1] * (end - self.length))
        return True

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        assert self.length == LONGEST_CONTEXT
        assert not self.is_partial
        self.time += self.steps[self.is_exact] + (self.delays.pop(0) if self.delays else 0.0)
        return super().verify(tree, first)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        if self.length:
            assert self.is_partial
            self.time += self.prompts[self.is_exact]
        super().prefill(tokens, progress)


def _compared(monkeypatch: pytest.MonkeyPatch, model: _TwoKernels) -> AttentionSpeed | None:
    monkeypatch.setattr(attention_speed, "now", model.clock)
    found = compare_attention(model, _OWN, _OTHER)
    assert (model.is_exact, model.is_partial, model.length) == (True, False, 0)
    return found


def test_speeds_are_those_in_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _compared(monkeypatch, _TwoKernels({True: 4.0, False: 2.0}, {True: 8.0, False: 2.0}))
    assert found == pytest.approx((0.5, 0.25))


def test_a_doubtful_loss_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another program slows down all four passes with the model's own kernels the first time.
    delays = [0.0] * 4 + [0.1] * 4
    found = _compared(monkeypatch, _TwoKernels({True: 1.0, False: 1.0}, {True: 1.0, False: 1.0}, delays))
    assert found == pytest.approx((1.0, 1.0))


def test_equal_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _TwoKernels({}, {})
    monkeypatch.setattr(attention_speed, "now", model.clock)
    assert compare_attention(model, _OWN, replace(_OWN, batch_tokens=64)) is None


def test_a_cancelled_comparison_leaves_the_models_own_kernels() -> None:
    model = _TwoKernels({True: 1.0, False: 1.0}, {True: 1.0, False: 1.0})
    with pytest.raises(CancelledError):
        compare_attention(model, _OWN, _OTHER, lambda *_: False)
    assert model.is_exact


@pytest.mark.parametrize(
    ("options", "differ"),
    [({}, True), ({"kv_type": "f16"}, False), ({"flash_attention": "off"}, False)],
)
def test_a_gguf_model_changes_its_kernels_only_if_the_options_select_others(
    demo_draft: Path, options: dict[str, str], differ: bool
) -> None:
    tokens = list(range(40, 60))
    given = LoadOptions(context_tokens=256, threads=1, **options)  # type: ignore[arg-type]
    off = replace(given, exact=False)
    expected = []
    for each in (given, off):
        model = load(str(demo_draft), "demo", each)
        model.prefill(tokens)
        expected.append(bytes(model.snapshot(0, len(tokens)).data))
        model.close()
    assert (expected[0] != expected[1]) == differ
    model = load(str(demo_draft), "demo", given)
    try:
        for each, cells in zip((off, given), reversed(expected), strict=True):
            model.prefill(tokens)
            assert model.use_attention(each) == differ
            assert model.length == 0
            assert not model.use_attention(each)
            model.prefill(tokens)
            assert bytes(model.snapshot(0, len(tokens)).data) == cells
    finally:
        model.close()
