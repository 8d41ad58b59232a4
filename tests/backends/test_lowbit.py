"""A low-bit copy drafts on the target's KV cells, after any change to them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, ClosedError, ContextFullError, MemoryBudgetError
from edgespec.loading.bit_exactness import WidthClass, restricted_to
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit
from edgespec.store.catalogue import models_folder
from tests.backends.contract import TREES, path_to, row_of, tokens_for, tree_of
from tests.backends.low_bit_pairs import CONTEXT, Pair, assert_like_fresh_view, draft_logits
from tests.backends.tiny_models import write_gemma2, write_gemma3, write_llama, write_mamba
from tests.cases import first
from tests.raising import raises

# Attention sums cells in memory order, which may vary. A missing or stale cell changes logits by more.
ROUNDING = 2e-3


def load(path: Path, **options: object) -> LanguageModel:
    given: dict[str, Any] = {"context_tokens": CONTEXT, "kv_type": "f16/bf16"} | options
    return llamacpp.load(str(path), "target", LoadOptions(**given))


def _demo(path: Path) -> Path:
    """Use the demo model, because quantised keys and values need larger heads than tiny models have."""
    return Path(shutil.copy(models_folder() / "demo-target-q8_0.gguf", path))


class Kind(NamedTuple):
    """A kind of target. `exit_layer` splits it for LayerSkip, or is 0 if it is not split."""

    write: Callable[[Path], Path]
    options: dict[str, object]
    exit_layer: int = 0


KINDS: dict[str, Kind] = {
    "full": Kind(write_llama, {}),
    "window": Kind(partial(write_gemma2, window=4), {}),
    "quantised": Kind(_demo, {"kv_type": "q8_0"}),
    "keys unlike values": Kind(_demo, {"kv_type": "q4_0/f16"}),
    "no flash attention": Kind(write_llama, {"flash_attention": "off", "kv_type": "f16"}),
    "split": Kind(partial(write_llama, layers=3), {}, 1),
    "split, window": Kind(partial(write_gemma3, window=4), {}, 6),
    "split, quantised": Kind(_demo, {"kv_type": "q8_0/q4_0"}, 4),
    "split, no flash attention": Kind(
        partial(write_llama, layers=3), {"flash_attention": "off", "kv_type": "f16"}, 2
    ),
}


def make_pair(folder: Path, kind: Kind) -> Pair:
    source, copy = kind.write(folder / "model.gguf"), folder / "copy.gguf"
    quantise(source, copy, "Q4_0")
    rounding = 0.0 if "q" in str(kind.options.get("kv_type")) else ROUNDING
    if not kind.exit_layer:
        return Pair(load(source, **kind.options), copy, rounding)
    split = prepare_layerskip(source, kind.exit_layer, to=folder / "split").folder
    given: dict[str, Any] = {"context_tokens": CONTEXT, "kv_type": "f16/bf16"} | kind.options
    return Pair(load_layerskip(str(split), "target", LoadOptions(**given)), copy, rounding)


# Each test run tests every option, and `-m long` all kinds.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.long if name in ("keys unlike values", "split") else ())
        for name in KINDS
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = make_pair(tmp_path_factory.mktemp("pair"), KINDS[request.param])
    yield pair
    pair.target.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = make_pair(tmp_path_factory.mktemp("full"), KINDS["full"])
    yield pair
    pair.target.close()


class Action(NamedTuple):
    what: str
    amount: int
    shape: tuple[int, ...]
    look: bool


actions = st.lists(
    st.builds(
        Action,
        st.sampled_from(
            ["commit"] * 3 + ["truncate", "prefill", "abandon", "cancel", "save", "restore", "new"]
        ),
        st.integers(0, 90),
        st.sampled_from(list(TREES.values())),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


class TestCopiedCells:
    @pytest.mark.long
    @settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(actions, st.sampled_from([None, 1, 7, 40]), st.integers(0, 5))
    def test_cells_match_after_any_history(
        self, pair: Pair, history: list[Action], window: int | None, sinks: int
    ) -> None:
        self.check(pair, history, LowBit(str(pair.copy), sinks, window))

    @pytest.mark.long
    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(actions, st.sampled_from([None, 1, 7, 40, 200]), st.integers(0, 9))
    def test_cells_match_after_many_histories(
        self, pair: Pair, history: list[Action], window: int | None, sinks: int
    ) -> None:
        self.check(pair, history, LowBit(str(pair.copy), sinks, window))

    @staticmethod
    def check(pair: Pair, history: list[Action], how: LowBit) -> None:
        target = pair.target
        target.truncate(0)
        view = target.self_draft(how)
        try:
            target.prefill(tokens_for(target, 30))
            saved = target.snapshot()
            for seed, act in enumerate(history):
                tree = tree_of(target, act.shape, seed)
                if act.look:
                    draft_logits(view, tree)
                if act.what == "truncate":
                    target.truncate(act.amount)
                elif act.what == "prefill":
                    target.prefill(tokens_for(target, min(act.amount, target.free_tokens), seed))
                elif act.what == "save":
                    saved = target.snapshot()
                elif act.what == "restore":
                    target.restore(saved)
                elif act.what == "new":
                    target.truncate(0)
                    target.prefill(tokens_for(target, act.amount, seed + 100))
                elif act.what == "cancel":
                    target.interrupt(True)
                    with pytest.raises(CancelledError):
                        target.verify(tree)
                    target.interrupt(False)
                else:
                    target.verify(tree)
                    if act.what == "commit":
                        target.commit(path_to(tree, act.amount % tree.width))
                assert view.length == target.length
            assert_like_fresh_view(pair, view, how, tree_of(target, TREES["deep and wide"]))
            target.truncate(target.length)
        finally:
            view.close()

    def test_a_copy_at_full_precision_gives_the_target_s_logits(self, full: Pair) -> None:
        target = full.target
        target.truncate(0)
        target.prefill(tokens_for(target, 300))
        view = target.self_draft(LowBit(target.facts.path))
        tree = tree_of(target, TREES["binary"])
        guessed = draft_logits(view, tree)
        logits = target.verify(tree)
        said = np.stack([row_of(target, logits, row) for row in range(tree.width)])
        np.testing.assert_allclose(guessed, said, rtol=0, atol=1e-4)
        target.truncate(0)
        view.close()

    def test_only_new_cells_are_copied(self, full: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        copied: list[tuple[int, int]] = []
        export_cells = LlamaContext.export_cells

        def counted(self: LlamaContext, source: int, start: int, end: int) -> list[memoryview]:
            copied.append((start, end))
            return export_cells(self, source, start, end)

        target = full.target
        target.truncate(0)
        view = full.view(sinks=2, window=10)
        whole = full.view()
        target.prefill(tokens_for(target, 400))
        monkeypatch.setattr(LlamaContext, "export_cells", counted)
        view.verify(TokenTree.chain(3))
        assert copied == [(0, 2), (386, 400)]
        whole.verify(TokenTree.chain(3))
        assert copied[2:] == [(0, 256), (256, 400)]
        target.verify(TokenTree.chain(3, [4, 5]))
        target.commit((1,))
        view.verify(TokenTree.chain(3))
        whole.verify(TokenTree.chain(3))
        assert copied[4:] == [(400, 402), (400, 402)]
        target.truncate(300)
        whole.verify(TokenTree.chain(3))
        assert copied[6:] == []
        view.close()
        whole.close()

    @pytest.mark.parametrize("window", [None, 20])
    def test_an_interrupt_while_copying_cells_is_recovered(
        self, full: Pair, window: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, import_cells = full.target, LlamaContext.import_cells
        target.truncate(0)
        view = full.view(4, window)
        target.prefill(tokens_for(target, 300))
        draft_logits(view, TokenTree.chain(3))
        target.truncate(0)
        target.prefill(tokens_for(target, 400, 1))

        def stopped(*_: object) -> bool:
            monkeypatch.setattr(LlamaContext, "import_cells", import_cells)
            raise KeyboardInterrupt

        monkeypatch.setattr(LlamaContext, "import_cells", stopped)
        with pytest.raises(KeyboardInterrupt):
            view.verify(TokenTree.chain(3))
        assert_like_fresh_view(
            full, view, LowBit(str(full.copy), 4, window), tree_of(target, TREES["binary"])
        )
        view.close()

    def test_an_interrupted_draft_leaves_no_cells_behind(self, full: Pair) -> None:
        target = full.target
        target.truncate(0)
        target.prefill(tokens_for(target, 300))
        view = full.view()
        view.interrupt(True)
        with pytest.raises(CancelledError):
            view.verify(TokenTree.chain(3))
        view.interrupt(False)
        assert_like_fresh_view(full, view, LowBit(str(full.copy)), tree_of(target, TREES["binary"]))
        view.close()


class TestAttentionWindow:
    @pytest.mark.long
    def test_a_window_larger_than_the_prompt_attends_to_everything(self, pair: Pair) -> None:
        target = pair.target
        target.truncate(0)
        target.prefill(tokens_for(target, 168))
        tree = tree_of(target, TREES["binary"])
        rows = []
        for window in (None, 101, 100):
            view = pair.view(4, window)
            rows.append(draft_logits(view, tree))
            view.close()
        np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=ROUNDING)
        assert np.abs(rows[0] - rows[2]).max() > ROUNDING

    @pytest.mark.long
    @pytest.mark.parametrize("left", first([2, 150, 50, 199], 2))
    def test_cells_return_to_the_window_after_a_rollback(self, pair: Pair, left: int) -> None:
        target = pair.target
        target.truncate(0)
        view = pair.view(4, 100)
        for tokens in (tokens_for(target, 120), tokens_for(target, 120, 1)):
            target.prefill(tokens)
            draft_logits(view, TokenTree.chain(3))
        target.truncate(left)
        assert_like_fresh_view(pair, view, LowBit(str(pair.copy), 4, 100), TokenTree.chain(3, [4, 5]))
        view.close()

    def test_memory_depends_on_the_window_and_not_on_the_prompt(self, full: Pair) -> None:
        target, view = full.target, full.view(4, 100)
        whole = full.view()
        assert view.facts.kv_bytes * 2 == whole.facts.kv_bytes == target.facts.kv_bytes
        assert view.facts.weight_bytes == whole.facts.weight_bytes < target.facts.weight_bytes
        target.truncate(0)
        target.prefill(tokens_for(target, 200))
        for seed in range(90):
            root, *guesses = tokens_for(target, 4, seed)
            tree = TokenTree.chain(root, guesses)
            # Every round drafts as many tokens as fit in the context.
            widest = min(view.facts.capabilities.max_width, view.free_tokens)
            view.verify(TokenTree.chain(root, tokens_for(target, widest - 1, seed)))
            target.verify(tree)
            target.commit((1, 2))
        assert_like_fresh_view(full, view, LowBit(str(full.copy), 4, 100), tree_of(target, TREES["binary"]))
        target.truncate(100)
        with raises(CapabilityError, code="draft_too_wide"):
            view.verify(TokenTree.chain(3, [4] * view.facts.capabilities.max_width))
        view.close()
        whole.close()


class TestLimits:
    def test_drafting_to_the_end_of_the_context(self, full: Pair) -> None:
        target, view = full.target, full.view()
        target.truncate(0)
        target.prefill(tokens_for(target, CONTEXT - 2))
        view.verify(TokenTree.chain(3, [4]))
        with pytest.raises(ContextFullError):
            view.verify(TokenTree.chain(3, [4, 5]))
        assert_like_fresh_view(full, view, LowBit(str(full.copy)), TokenTree.chain(5, [6]))
        view.close()

    def test_too_many_branches_are_refused(self, full: Pair) -> None:
        view = full.view()
        full.target.truncate(20)
        with raises(CapabilityError, code="draft_too_wide"):
            view.verify(tree_of(full.target, (-1, *[0] * 12)))
        assert_like_fresh_view(full, view, LowBit(str(full.copy)), TokenTree.chain(5, [6]))
        view.close()

    def test_a_view_does_not_change_the_target(self, full: Pair) -> None:
        target, view = full.target, full.view()
        target.truncate(0)
        target.prefill(tokens_for(target, 20))
        view.verify(TokenTree.chain(3))
        view.commit(())
        view.truncate(3)
        view.prefill([1, 2, 3])
        assert view.length == target.length == 20
        with raises(CapabilityError, "low-bit"):
            target.remove_range(4, 8)
        view.close()
        target.remove_range(4, 8)
        assert target.length == 16

    def test_closed_views_and_targets_raise(self, tmp_path: Path) -> None:
        target, copy, _ = make_pair(tmp_path, KINDS["full"])
        first, second = (target.self_draft(LowBit(str(copy))) for _ in range(2))
        first.close()
        first.close()
        with pytest.raises(ClosedError):
            first.verify(TokenTree.chain(3))
        second.verify(TokenTree.chain(3))
        target.close()
        with pytest.raises(ClosedError):
            second.verify(TokenTree.chain(3))
        second.close()


class TestRefusals:
    def test_a_copy_of_another_architecture_is_refused(self, full: Pair, tmp_path: Path) -> None:
        other = write_gemma2(tmp_path / "other.gguf")
        with raises(CapabilityError, "gemma2", "llama", code="model_mismatch"):
            full.target.self_draft(LowBit(str(other)))

    def test_a_copy_with_another_vocabulary_is_refused(self, full: Pair, tmp_path: Path) -> None:
        other = write_llama(tmp_path / "other.gguf", words=tuple(f"▁word{i}" for i in range(10)))
        with raises(CapabilityError, "vocabulary hash", code="model_mismatch"):
            full.target.self_draft(LowBit(str(other)))

    def test_a_copy_with_another_trained_context_is_refused(self, full: Pair, tmp_path: Path) -> None:
        other = write_llama(tmp_path / "other.gguf", context=256)
        with raises(CapabilityError, "context_length", "256", "512", code="model_mismatch"):
            full.target.self_draft(LowBit(str(other)))

    def test_unsupported_methods_are_refused(self, full: Pair) -> None:
        with raises(CapabilityError, "prepare lowbit", code="lowbit_not_supported"):
            full.target.self_draft(LowBit())
        with raises(CapabilityError, code="early_exit_not_supported"):
            full.target.self_draft(EarlyExit(1))

    def test_another_missing_feature_is_not_given_as_the_reason(
        self, full: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A class of pass widths without draft trees has its own reason, which does not concern copies."""
        facts = full.target.facts
        no_trees = restricted_to(
            replace(facts.capabilities, self_draft_methods=frozenset()), WidthClass((1, 2))
        )
        assert no_trees.reason
        monkeypatch.setattr(full.target, "facts", replace(facts, capabilities=no_trees))
        with raises(CapabilityError, "its KV cells cannot be copied", code="lowbit_not_supported"):
            full.target.self_draft(LowBit(str(full.copy)))

    def test_a_recurrent_model_is_refused(self, tmp_path: Path) -> None:
        target = load(write_mamba(tmp_path / "mamba.gguf"))
        with pytest.raises(CapabilityError):
            target.self_draft(LowBit(target.facts.path))
        target.close()

    def test_a_copy_beyond_the_memory_budget_is_refused(self, full: Pair) -> None:
        known = full.view()
        needed = sum(m.facts.weight_bytes + m.facts.kv_bytes for m in (full.target, known))
        known.close()
        target = load(Path(full.target.facts.path), memory_bytes=needed - 1)
        with pytest.raises(MemoryBudgetError):
            target.self_draft(LowBit(str(full.copy)))
        view = target.self_draft(LowBit(str(full.copy), 4, 100))
        view.verify(TokenTree.chain(3))
        view.close()
        target.close()
