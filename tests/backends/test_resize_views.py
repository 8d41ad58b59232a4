"""Self-drafting views follow the target's context size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ContextFullError, MemoryBudgetError
from edgespec.model.base import EarlyExit, LanguageModel, LowBit
from tests.backends.contract import TREES, row_of, tokens_for, tree_of
from tests.backends.resizable import LARGE, SMALL, load
from tests.raising import raises


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
                self._free()
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
                self._free()
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
