"""A split model gives the logits and the replies of the whole model, whatever its lower layers drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.api.runtime import Runtime
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import context_planning
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.layerskip import LayerSkipModel, load_layerskip
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import library
from edgespec.decode.drafter_set import DrafterSet
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ClosedError, MemoryBudgetError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.methods.base import DrafterMemory
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit
from edgespec.model.formats.layerskip_files import SHARED_BYTES_KEY
from tests.backends.contract import TREES, path_to, row_of, same, step, tokens_for, tree_of
from tests.cases import covering
from tests.raising import raises
from tests.tables import lookups

EXITS = (1, 4, 9)


@pytest.fixture(scope="session")
def folders(
    demo_target: Path, demo_in_halves: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """The demo target split at each exit layer."""
    folder = tmp_path_factory.mktemp("split")
    return {4: demo_in_halves} | {
        exit_layer: prepare_layerskip(demo_target, exit_layer, to=folder / str(exit_layer)).folder
        for exit_layer in EXITS
        if exit_layer != 4
    }


CONTEXT = 512


def _options(**more: Any) -> LoadOptions:
    return LoadOptions(context_tokens=CONTEXT, **more)


class Both(NamedTuple):
    whole: LanguageModel
    split: LayerSkipModel


@pytest.fixture(scope="module")
def both(demo_target: Path, folders: dict[int, Path]) -> Iterator[Both]:
    """The demo target, whole and split."""
    models = Both(
        llamacpp.load(str(demo_target), "demo", _options()),
        load_layerskip(str(folders[4]), "demo", _options()),
    )
    yield models
    for model in models:
        model.close()


@pytest.fixture(scope="module")
def narrow(folders: dict[int, Path]) -> Iterator[LayerSkipModel]:
    """A split model whose lower split runs only 16 rows per pass, as with a large vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_planning, "_UNREAD_BYTES", 0)
        model = load_layerskip(str(folders[4]), "demo", _options(max_branches=12))
    assert model._lower.context.max_width == 16
    yield model
    model.close()


@pytest.fixture
def split(both: Both) -> LayerSkipModel:
    both.split.truncate(0)
    return both.split


class TestEqualsWholeModel:
    @pytest.mark.long
    def test_facts_equal_those_of_the_whole_model(self, both: Both) -> None:
        mine, its = both.split.facts, both.whole.facts
        for name in ("weight_bytes", "kv_bytes", "parameters", "quantisation", "description", "architecture"):
            assert getattr(mine, name) == getattr(its, name)
        assert mine.capabilities.self_draft_methods == {"layerskip", "lowbit"}
        assert mine.chat_template == its.chat_template
        assert mine.file_bytes < its.file_bytes * 1.05

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("kv_type", "flash_attention"), covering(("f16", "q8_0", "q8_0/q4_0"), ("auto", "on"))
    )
    def test_logits_are_bit_identical(
        self, demo_target: Path, folders: dict[int, Path], kv_type: str, flash_attention: str
    ) -> None:
        options = _options(kv_type=kv_type, flash_attention=flash_attention)
        models = [
            llamacpp.load(str(demo_target), "demo", options),
            load_layerskip(str(folders[9]), "demo", options),
        ]
        tokens, tree = tokens_for(models[0], 60), tree_of(models[0], TREES["deep and wide"])
        rows = []
        for model in models:
            model.prefill(tokens)
            logits = model.verify(tree)
            mine = [row_of(model, logits, node) for node in range(tree.width)]
            model.commit(path_to(tree, tree.width - 1))
            rows.append(np.array([*mine, *(step(model, token) for token in tokens[:5])]))
            model.close()
        np.testing.assert_array_equal(rows[0], rows[1])

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("offloads", "system", "options", "times"),
        [
            (False, "linux", {}, 1),
            (False, "linux", {"mmap": False}, 2),
            (True, "linux", {}, 2),
            (True, "linux", {"gpu_layers": 0}, 1),
            (True, "darwin", {}, 1),
            (True, "darwin", {"mmap": False}, 2),
        ],
    )
    def test_shared_tensors_count_once_only_where_they_are_mapped(
        self,
        both: Both,
        folders: dict[int, Path],
        monkeypatch: pytest.MonkeyPatch,
        offloads: bool,
        system: str,
        options: dict[str, Any],
        times: int,
    ) -> None:
        monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: offloads)
        monkeypatch.setattr("edgespec.backends.llamacpp.devices.sys.platform", system)
        shared = int(metadata(both.split.weights[0], SHARED_BYTES_KEY) or 0)
        assert shared > 1_000_000
        model = load_layerskip(str(folders[4]), "demo", _options(**options))
        assert model.facts.weight_bytes == both.whole.facts.weight_bytes + (times - 1) * shared
        model.close()

    def test_a_snapshot_of_the_whole_model_is_refused(self, both: Both, split: LayerSkipModel) -> None:
        both.whole.truncate(0)
        both.whole.prefill(tokens_for(both.whole, 20))
        with raises(BackendError, code="state_not_restored"):
            split.restore(both.whole.snapshot())
        assert split.length == 0


class TestSeveralPasses:
    """Trees wider than a pass of the lower layers are run in several passes."""

    def test_prompts_and_wide_trees(self, both: Both, narrow: LayerSkipModel) -> None:
        tokens = tokens_for(narrow, 61)
        tree = tree_of(narrow, (-1, *range(30), 3, 3, 20, 33, 34), 1)
        models = both.whole, both.split, narrow
        assert {model.facts.capabilities.max_width for model in models} == {256}
        rows = []
        for model in models:
            model.truncate(0)
            model.prefill(tokens)
            logits = model.verify(tree)
            mine = [row_of(model, logits, node) for node in range(tree.width)]
            model.commit(path_to(tree, tree.width - 1))
            rows.append(np.array([*mine, *(step(model, token) for token in tokens[:5])]))
        np.testing.assert_array_equal(rows[1], rows[0])
        np.testing.assert_array_equal(rows[2], rows[0])

    def test_wide_drafts(self, both: Both, narrow: LayerSkipModel) -> None:
        tokens = tokens_for(narrow, 40)
        draft = tree_of(narrow, (-1, *([0] * 5), *([1] * 4), *range(9, 29)), 2)
        said = []
        for model in (both.split, narrow):
            model.truncate(0)
            model.prefill(tokens)
            logits = model.self_draft(EarlyExit(4)).verify(draft)
            said.append([row_of(model, logits, node) for node in range(draft.width)])
            # The target then verifies the same tree.
            logits = model.verify(draft)
            said[-1] += [row_of(model, logits, node) for node in range(draft.width)]
            model.commit(path_to(draft, 9))
            said[-1].append(step(model, 4))
        np.testing.assert_array_equal(said[0], said[1])

    def test_a_prefill_interrupted_between_two_passes(
        self, narrow: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = tokens_for(narrow, 50)
        narrow.truncate(0)
        narrow.prefill(tokens)
        expected = step(narrow, 4)
        narrow.truncate(20)
        run_to_hook = LlamaContext.run_to_hook

        def once(self: LlamaContext, *given: Any) -> None:
            run_to_hook(self, *given)
            narrow.interrupt(True)

        monkeypatch.setattr(LlamaContext, "run_to_hook", once)
        with pytest.raises(CancelledError):
            narrow.prefill(tokens[20:])
        narrow.interrupt(False)
        monkeypatch.setattr(LlamaContext, "run_to_hook", run_to_hook)
        assert narrow.length == 20
        narrow.prefill(tokens[20:])
        np.testing.assert_array_equal(step(narrow, 4), expected)

    def test_the_budget_includes_the_logits_of_the_lower_split(
        self, folders: dict[int, Path], both: Both
    ) -> None:
        """These logits are limited for every vocabulary."""
        facts, below = both.split.facts, both.split._lower.context
        logits_bytes = 4 * facts.vocab_size * below.max_width
        assert logits_bytes <= context_planning._UNREAD_BYTES
        enough = facts.weight_bytes + facts.kv_bytes + 2 * logits_bytes
        # The size of the files is checked before anything is loaded.
        assert enough > facts.file_bytes
        load_layerskip(str(folders[4]), "demo", _options(memory_bytes=enough)).close()
        with raises(MemoryBudgetError, "512"):
            load_layerskip(str(folders[4]), "demo", _options(memory_bytes=enough - 1))


Tree: TypeAlias = tuple[tuple[int, ...], int]
trees = st.tuples(st.sampled_from(list(TREES.values())), st.integers(0, 3))
ROUNDS = st.lists(st.tuples(trees, trees, st.integers(0, 11), st.booleans()), min_size=1, max_size=5)


def _watched_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which the tokens of each pass over the lower layers are added."""
    run: list[tuple[int, ...]] = []
    run_to_hook = LlamaContext.run_to_hook

    def watched(self: LlamaContext, tokens: tuple[int, ...], *rest: Any) -> None:
        run.append(tuple(tokens))
        run_to_hook(self, tokens, *rest)

    monkeypatch.setattr(LlamaContext, "run_to_hook", watched)
    return run


class TestReusedDrafts:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "examples", [12, pytest.param(100, marks=pytest.mark.long)], ids=["some", "many"]
    )
    def test_logits_equal_the_whole_model_s_after_any_draft(
        self, both: Both, narrow: LayerSkipModel, examples: int
    ) -> None:
        """The target's tree may share some of the draft's nodes, in any order."""

        @settings(max_examples=examples)
        @given(ROUNDS)
        def check(rounds: list[tuple[Tree, Tree, int, bool]]) -> None:
            for split in (both.split, narrow):
                self.check(both.whole, split, rounds)

        check()

    @staticmethod
    def check(
        whole: LanguageModel, split: LayerSkipModel, rounds: list[tuple[Tree, Tree, int, bool]]
    ) -> None:
        view = split.self_draft(EarlyExit(4))
        for model in (whole, split):
            model.truncate(0)
            model.prefill(tokens_for(model, 20))
        for drafted, wanted, node, begins_alike in rounds:
            tree, draft = tree_of(whole, *wanted), tree_of(whole, *drafted)
            if begins_alike:
                draft = _with_root(draft, tree.tokens[0])
            for first in range(0, draft.width, 2):
                end = first + 2
                view.verify(
                    TokenTree(draft.tokens[:end], draft.parents[:end], draft.draft_probs[:end]), first
                )
            logits, expected = split.verify(tree), whole.verify(tree)
            for row in range(tree.width):
                same(whole, row_of(split, logits, row), row_of(whole, expected, row))
            path = path_to(tree, node % tree.width)
            for model in (whole, split):
                model.commit(path)
            assert view.length == split.length == whole.length
            same(whole, step(split, 4), step(whole, 4))

    @pytest.mark.parametrize("tree", [True, False])
    def test_a_rejected_draft_is_removed_first_if_trees_round_differently(
        self, split: LayerSkipModel, monkeypatch: pytest.MonkeyPatch, tree: bool
    ) -> None:
        """Attention may sum in another order if rejected tokens are between others in the cache."""
        capabilities = replace(split.facts.capabilities, tree=tree)
        monkeypatch.setattr(split, "facts", replace(split.facts, capabilities=capabilities))
        split.prefill(tokens_for(split, 20))
        view = split.self_draft(EarlyExit(4))
        for first in range(3):
            view.verify(TokenTree.chain(5, [6, 7][:first]), first)
        run = _watched_passes(monkeypatch)
        split.verify(TokenTree.chain(5, [6, 8]))
        assert run == ([(8,)] if tree else [(5, 6, 8)])

    def test_drafted_nodes_are_not_run_again(
        self, split: LayerSkipModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        split.prefill(tokens_for(split, 20))
        view = split.self_draft(EarlyExit(4))
        for first in range(3):
            view.verify(TokenTree.chain(5, [6, 7][:first]), first)
        run = _watched_passes(monkeypatch)
        split.verify(TokenTree.chain(5, [6, 7, 8]))
        assert run == [(8,)]
        split.commit((1, 2, 3))
        view.verify(TokenTree.chain(9))
        split.verify(TokenTree.chain(9))
        assert run == [(8,)]

    def test_run_to_hook_ends_before_the_logits(self, split: LayerSkipModel) -> None:
        below = split._lower.context
        split.prefill([1, 2, 3])
        whole = below.run([5], [3], [[0]]).copy()
        below.drop(0, 3)
        below.run([4], [3], [[0]])
        below.drop(0, 3)
        below.run_to_hook([5], [3], [[0]])
        # The logits buffer still holds those of an earlier pass.
        assert not np.array_equal(below._logits[:1], whole)

    def test_a_view_does_not_change_the_target(self, split: LayerSkipModel) -> None:
        tokens = tokens_for(split, 30)
        split.prefill(tokens)
        expected = step(split, 4)
        split.truncate(30)
        view = split.self_draft(EarlyExit(4))
        view.prefill([1, 2, 3])
        view.verify(TokenTree.chain(4, [5, 6]))
        view.commit((1,))
        view.truncate(3)
        assert view.length == split.length == 30
        assert view.free_tokens == split.free_tokens
        view.close()
        same(split, step(split, 4), expected)
        with pytest.raises(ClosedError):
            view.verify(TokenTree.chain(4))

    def test_a_draft_from_before_a_truncation_is_not_reused(self, both: Both) -> None:
        tokens = tokens_for(both.whole, 30)
        for model in both:
            model.truncate(0)
            model.prefill(tokens)
        view = both.split.self_draft(EarlyExit(4))
        view.verify(TokenTree.chain(4, [5, 6]))
        for model in both:
            model.truncate(10)
        tree = TokenTree.chain(4, [5, 6])
        rows = [row_of(model, model.verify(tree), 2) for model in both]
        same(both.whole, *rows)

    @pytest.mark.parametrize(
        ("how", "code", "says"),
        [
            (EarlyExit(5), "early_exit_not_supported", "layer 4"),
            (LowBit(), "lowbit_not_supported", "specified"),
        ],
    )
    def test_unsupported_self_draft_methods_are_refused(
        self, split: LayerSkipModel, how: Any, code: str, says: str
    ) -> None:
        with raises(CapabilityError, says, code=code):
            split.self_draft(how)


def _with_root(tree: TokenTree, root: int) -> TokenTree:
    return TokenTree((root, *tree.tokens[1:]), tree.parents, tree.draft_probs)


PROMPTS = ("How do I list files by size?", "Write the numbers 1 to 20, then write the numbers 1 to 20 again.")


@pytest.fixture(scope="module")
def plain(demo_target: Path) -> Iterator[Runtime]:
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=512))
    with Runtime(model, None, DrafterSet(model)) as runtime:
        yield runtime


def _drafting(folder: Path, branches: tuple[int, ...] = (), **options: Any) -> Runtime:
    """Return a runtime of the split model that drafts with its lower layers."""
    model = load_layerskip(str(folder), "demo", LoadOptions(context_tokens=512, **options))
    view = model.self_draft(EarlyExit(model.exit_layer))
    drafter = ModelDrafter(view, model.facts.vocab_size, branches=branches, name="layerskip")
    assert drafter.memory_use == DrafterMemory()
    return Runtime(model, None, DrafterSet(model, {**lookups(), "layerskip": drafter}))


class TestSameReplies:
    @pytest.mark.long
    @pytest.mark.parametrize(("exit_layer", "branches"), covering(EXITS, ((), (3, 2))))
    def test_replies_equal_plain_decoding(
        self, plain: Runtime, folders: dict[int, Path], exit_layer: int, branches: tuple[int, ...]
    ) -> None:
        with _drafting(folders[exit_layer], branches) as runtime:
            for prompt, temperature in zip(PROMPTS, (0.0, 0.8), strict=True):
                asked: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": 24}
                expected = plain.generate(prompt, method="none", **asked)
                for method in ("none", "layerskip", "layerskip+ngram"):
                    reply = runtime.generate(prompt, method=method, **asked)
                    assert reply.text == expected.text
                    if method == "layerskip":
                        assert reply.stats.drafted_tokens > 0

    @pytest.mark.long
    def test_replies_with_a_quantised_kv_cache(self, folders: dict[int, Path]) -> None:
        with _drafting(folders[4], kv_type="q8_0") as runtime:
            for prompt in PROMPTS:
                for temperature in (0.0, 0.8):
                    asked: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 24}
                    expected = runtime.generate(prompt, method="none", **asked)
                    assert runtime.generate(prompt, method="layerskip", **asked).text == expected.text

    @pytest.mark.long
    def test_replies_in_rejection_mode_at_temperature_0(
        self, plain: Runtime, folders: dict[int, Path]
    ) -> None:
        with _drafting(folders[4], (2,)) as runtime:
            for prompt in PROMPTS:
                asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "acceptance": "rejection"}
                expected = plain.generate(prompt, method="none", **asked)
                for method in ("layerskip", "layerskip+ngram"):
                    assert runtime.generate(prompt, method=method, **asked).text == expected.text
