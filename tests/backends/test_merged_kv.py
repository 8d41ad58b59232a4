"""Merged KV cells of a split model equal those of the whole model, so a low-bit copy drafts the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.api.runtime import Runtime
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.context_planning import work_bytes
from edgespec.backends.llamacpp.kv_sequences import merge_kv
from edgespec.backends.llamacpp.layerskip import LayerSkipModel, load_layerskip
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.decode.drafter_set import DrafterSet
from edgespec.errors import CapabilityError, MemoryBudgetError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit
from tests.backends.contract import TREES, path_to, row_of, step, tokens_for, tree_of
from tests.backends.tiny_models import write_gemma3, write_llama
from tests.cases import covering
from tests.raising import raises
from tests.tables import lookups

CONTEXT = 512
PROMPTS = ("How do I list files by size?", "Write the numbers 1 to 20, then write the numbers 1 to 20 again.")


class Forms(NamedTuple):
    """Versions of a model: the original, split, and as a low-bit copy."""

    whole: Path
    split: Path
    copy: Path

    def load(self, **options: Any) -> tuple[LlamaCppModel, LayerSkipModel]:
        how = LoadOptions(context_tokens=CONTEXT, exact=False, **options)
        whole = llamacpp.load(str(self.whole), "whole", how)
        assert isinstance(whole, LlamaCppModel)
        return whole, load_layerskip(str(self.split), "split", how)


def forms_of(source: Path, exit_layer: int, folder: Path) -> Forms:
    copy = folder / "copy.gguf"
    quantise(source, copy, "Q4_0")
    return Forms(source, prepare_layerskip(source, exit_layer, to=folder / "split").folder, copy)


@pytest.fixture(scope="module")
def demo(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return forms_of(demo_target, 4, tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    folder = tmp_path_factory.mktemp("tiny")
    return forms_of(write_llama(folder / "model.gguf", layers=3), 1, folder)


def cells(model: LlamaCppModel | LayerSkipModel) -> list[bytes]:
    return [bytes(part) for part in model.export_cells(0, model.length)]


class TestMergedBytes:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "options",
        [{}, {"kv_type": "f16", "flash_attention": "off"}, {"kv_type": "q8_0/q4_0"}],
        ids=["plain", "transposed", "quantised"],
    )
    def test_merged_cells_equal_those_of_the_whole_model(self, demo: Forms, options: dict[str, Any]) -> None:
        self.check(demo, options)

    @pytest.mark.long
    @pytest.mark.parametrize("flash_attention", ["on", "off"])
    def test_merged_cells_with_sliding_window_layers(self, tmp_path: Path, flash_attention: str) -> None:
        source = write_gemma3(tmp_path / "model.gguf", window=8)
        options = {"kv_type": "f16", "flash_attention": flash_attention}
        # All upper layers have a sliding window.
        self.check(forms_of(source, 6, tmp_path), options)

    @staticmethod
    def check(forms: Forms, options: dict[str, Any]) -> None:
        models = forms.load(**options)
        tree = tree_of(models[0], TREES["deep and wide"])
        kept, rows = [], []
        for model in models:
            model.prefill(tokens_for(model, 60))
            model.verify(tree)
            model.commit(path_to(tree, tree.width - 1))
            kept.append(cells(model))
            view = model.self_draft(LowBit(str(forms.copy)))
            logits = view.verify(tree)
            rows.append([row_of(view, logits, node) for node in range(tree.width)])
            view.close()
            model.close()
        assert kept[0] == kept[1]
        np.testing.assert_array_equal(rows[0], rows[1])

    @pytest.mark.parametrize("options", [{}, {"kv_type": "f16", "flash_attention": "off"}])
    def test_cells_in_another_order_are_sorted(self, tiny: Forms, options: dict[str, Any]) -> None:
        whole, split = tiny.load(**options)
        for model in (whole, split):
            model.prefill(tokens_for(model, 9))
        expected = cells(whole)
        assert cells(split) == expected
        # Swap two cells of the upper split.
        above = split._context
        later, earlier = above.export_cells(0, 6, 7), above.export_cells(0, 2, 3)
        for position in (2, 6):
            above.drop(0, position, position + 1)
        assert above.import_cells(later, 6, 7)
        assert above.import_cells(earlier, 2, 3)
        assert [bytes(part) for part in above.export_cells(0, 0, 9)] != expected
        assert cells(split) == expected
        for model in (whole, split):
            model.close()


class TestInvalidBytes:
    @pytest.fixture(scope="class")
    def parts(self, tiny: Forms) -> Iterator[tuple[bytes, bytes]]:
        whole, split = tiny.load()
        split.prefill([5, 6, 7])
        yield tuple(bytes(half.export_cells(0, 0, 3)[0]) for half in (split._lower.context, split._context))  # type: ignore[misc]
        whole.close()
        split.close()

    @pytest.mark.parametrize(
        ("at", "value", "says"),
        [
            (0, 1, "the KV caches of the lower and the upper layers have different formats"),
            (8, 2, "the exported KV data has more than one stream"),
            (12, 2, "the exported KV data has an unknown layout"),
            (16, 9, "the KV caches of the lower and the upper layers contain different tokens"),
            (20, 2, "a KV cell belongs to several sequences"),
            (52, 2, "the exported KV data has an unknown layout"),
            (52, 1, "the exported KV data is truncated"),
            (56, 7, "the exported KV data is truncated"),
            (64, 1, "the exported KV data is truncated"),
        ],
    )
    def test_an_unknown_layout_is_refused(
        self, parts: tuple[bytes, bytes], at: int, value: int, says: str
    ) -> None:
        changed = bytearray(parts[1])
        changed[at] = value
        with raises(CapabilityError, says, code="lowbit_not_supported"):
            merge_kv([memoryview(parts[0])], [memoryview(changed)], "m")

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_truncated_or_random_bytes_are_refused(
        self, parts: tuple[bytes, bytes], data: st.DataObject
    ) -> None:
        cut = data.draw(st.integers(0, len(parts[1]) - 1))
        more = data.draw(st.binary(max_size=40))
        if len(parts[1]) != cut + len(more):
            with pytest.raises(CapabilityError):
                merge_kv([memoryview(parts[0])], [memoryview(parts[1][:cut] + more)], "m")
        with pytest.raises(CapabilityError):
            merge_kv([memoryview(parts[0])], [], "m")
        few = [memoryview(parts[0][: min(cut, 50)])]
        with raises(CapabilityError, "is truncated", code="lowbit_not_supported"):
            merge_kv(few, few, "m")

    def test_a_model_with_another_format_does_not_support_lowbit(
        self, tiny: Forms, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("edgespec.backends.llamacpp.kv_sequences._HEADER_BYTES", 4)
        split = load_layerskip(str(tiny.split), "tiny", LoadOptions(context_tokens=CONTEXT))
        assert split.facts.capabilities.self_draft_methods == {"layerskip"}
        with raises(CapabilityError, code="lowbit_not_supported"):
            split.self_draft(LowBit(str(tiny.copy)))
        split.prefill([1, 2, 3])
        split.self_draft(EarlyExit(1)).close()
        split.close()


class TestBothDrafts:
    def test_remove_range_is_refused_while_a_draft_uses_the_cache(self, tiny: Forms) -> None:
        whole, split = tiny.load()
        split.prefill(tokens_for(split, 20))
        view = split.self_draft(LowBit(str(tiny.copy)))
        with raises(CapabilityError, "low-bit"):
            split.remove_range(4, 8)
        view.close()
        for model in (whole, split):
            model.truncate(0)
            model.prefill(tokens_for(model, 20))
            model.remove_range(4, 8)
            model.verify(tree_of(model, TREES["binary"]))
            model.commit(())
        rows = []
        for model in (whole, split):
            view = model.self_draft(LowBit(str(tiny.copy)))
            rows.append(step(view, 3))
            view.close()
            model.close()
        np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=1e-5)

    def test_layerskip_and_lowbit_drafts_work_side_by_side(self, tiny: Forms) -> None:
        whole, split = tiny.load()
        early, copy = split.self_draft(EarlyExit(1)), split.self_draft(LowBit(str(tiny.copy)))
        of_whole = whole.self_draft(LowBit(str(tiny.copy)))
        tree = tree_of(whole, TREES["binary"])
        for model in (whole, split):
            model.prefill(tokens_for(model, 20))
        for node in (1, 5, 2):
            early.verify(tree)
            logits, expected = copy.verify(tree), of_whole.verify(tree)
            for row in range(tree.width):
                np.testing.assert_array_equal(row_of(copy, logits, row), row_of(of_whole, expected, row))
            early.verify(tree)
            for model in (whole, split):
                model.verify(tree)
                model.commit(path_to(tree, node))
        for opened in (early, copy, of_whole, whole, split):
            opened.close()

    @pytest.mark.long
    def test_a_copy_beyond_the_memory_budget_is_refused(self, demo: Forms) -> None:
        whole, split = demo.load()
        view = split.self_draft(LowBit(str(demo.copy)))
        needed = sum(model.facts.weight_bytes + model.facts.kv_bytes for model in (split, view))
        needed += work_bytes(split.weights[0], LoadOptions())
        for model in (view, split, whole):
            model.close()
        for budget in (needed - 1, needed):
            options = LoadOptions(context_tokens=CONTEXT, memory_bytes=budget)
            split = load_layerskip(str(demo.split), "demo", options)
            if budget < needed:
                with pytest.raises(MemoryBudgetError):
                    split.self_draft(LowBit(str(demo.copy)))
            else:
                split.self_draft(LowBit(str(demo.copy))).close()
            split.close()


def _runtime(model: LanguageModel, copy: Path, how: LowBit) -> Runtime:
    others: dict[str, Any] = {**lookups()}
    for name, way in (("layerskip", EarlyExit(4)), ("lowbit", how)):
        if name in model.facts.capabilities.self_draft_methods:
            others[name] = ModelDrafter(model.self_draft(way), model.facts.vocab_size, name=name)
    return Runtime(model, None, DrafterSet(model, others))


class TestSameReplies:
    @pytest.mark.long
    @pytest.mark.parametrize(("kv_type", "window"), covering(("auto", "q8_0"), (None, 24)))
    def test_replies_equal_plain_decoding_with_equal_acceptance(
        self, demo: Forms, kv_type: str, window: int | None
    ) -> None:
        """Drafts on the split model are as good as those on the whole model, which start one token later."""
        how = LowBit(str(demo.copy), 4, window)
        whole, split = (_runtime(model, demo.copy, how) for model in demo.load(kv_type=kv_type))
        with whole, split:
            for prompt in PROMPTS:
                for temperature in (0.0, 0.8):
                    asked: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": 24}
                    expected = whole.generate(prompt, method="none", **asked)
                    first = whole.generate(prompt, method="lowbit", **asked)
                    for method in ("lowbit", "layerskip", "lowbit+ngram", "none"):
                        reply = split.generate(prompt, method=method, **asked)
                        assert reply.tokens == expected.tokens
                        if method == "lowbit":
                            assert abs(reply.stats.drafted_tokens - first.stats.drafted_tokens) <= 4
                            assert abs(reply.stats.accepted_tokens - first.stats.accepted_tokens) <= 4
                            assert reply.stats.accepted_tokens

    @pytest.mark.long
    def test_replies_in_rejection_mode(self, demo: Forms) -> None:
        whole, split = (_runtime(model, demo.copy, LowBit(str(demo.copy))) for model in demo.load())
        with whole, split:
            for prompt in PROMPTS:
                for temperature in (0.0, 0.8):
                    asked: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 40}
                    asked["acceptance"] = "rejection"
                    reply = split.generate(prompt, method="lowbit", **asked)
                    assert reply.stats.accepted_tokens
                    if temperature == 0:
                        plain = whole.generate(prompt, method="none", **asked)
                        assert reply.tokens == plain.tokens
