"""A context of another size remembers the same, to the bit; where it cannot be had nothing is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp, mlx
from edgespec.backends.base import EarlyExit, LanguageModel, LoadOptions, LowBit
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.tabular import TabularModel
from edgespec.catalog.catalogue import models_folder
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    MemoryBudgetError,
)
from edgespec.prepare.layerskip import prepare_layerskip
from tests.backends.contract import (
    ROUNDING,
    TREES,
    cut,
    path_to,
    row_of,
    step,
    tokens_for,
    tokens_to,
    tree_of,
)
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.backends.rewindable import StateModel, replayed_table
from tests.backends.tiny_models import (
    write_gemma2,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_llama,
    write_mamba,
)

SMALL, LARGE = 256, 1024

# (folder, how) -> a model.
Maker = Callable[[Path, LoadOptions], LanguageModel]


def _demo(_: Path) -> Path:
    return models_folder() / "demo-target-q8_0.gguf"


def _gguf(write: Callable[[Path], Path], folder: Path, how: LoadOptions) -> LanguageModel:
    return llamacpp.load(str(write(folder / "model.gguf")), "model", how)


def _halves(write: Callable[[Path], Path], exit_layer: int, folder: Path, how: LoadOptions) -> LanguageModel:
    to = folder / "halves"
    if not to.exists():
        prepare_layerskip(write(folder / "model.gguf"), exit_layer, to=to)
    return load_layerskip(str(to), "model", how)


def _mlx(kind: str, folder: Path, how: LoadOptions) -> LanguageModel:
    path = folder / kind
    return mlx.load(str(path if path.exists() else write_checkpoint(path, kind)), "model", how)


def _tabular(_: Path, how: LoadOptions) -> LanguageModel:
    table = np.random.default_rng(0).normal(size=(11**2, 11)).astype(np.float32)
    return TabularModel(table, context_tokens=how.first_tokens or how.context_tokens or 0)


def _replayed(_: Path, how: LoadOptions) -> LanguageModel:
    return replayed_table(StateModel(context_tokens=how.first_tokens or how.context_tokens or 0))


class Kind(NamedTuple):
    """rounding: how far logits may lie apart, where tokens are run again in passes of other widths."""

    make: Maker
    options: Mapping[str, Any] = MappingProxyType({})
    rounding: float = 0.0


KINDS = {
    "full": Kind(partial(_gguf, write_llama)),
    "window": Kind(partial(_gguf, partial(write_gemma2, window=4))),
    "quantised": Kind(partial(_gguf, _demo), {"kv_type": "q8_0"}),
    "keys unlike values": Kind(partial(_gguf, _demo), {"kv_type": "q4_0/f16"}),
    "no flash attention": Kind(partial(_gguf, write_llama), {"flash_attention": "off", "kv_type": "f16"}),
    "mamba": Kind(partial(_gguf, write_mamba), {}, ROUNDING["mamba"]),
    "hybrid": Kind(partial(_gguf, write_jamba), {}, ROUNDING["hybrid"]),
    "short convolution": Kind(partial(_gguf, write_lfm2), {}, ROUNDING["short convolution"]),
    "halves": Kind(partial(_halves, partial(write_llama, layers=3), 1)),
    "halves, window": Kind(partial(_halves, partial(write_gemma3, window=4), 6)),
    "halves, quantised": Kind(partial(_halves, _demo, 4), {"kv_type": "q8_0/q4_0"}),
    "MLX": Kind(partial(_mlx, "llama")),
    "MLX, window": Kind(partial(_mlx, "gemma3")),
    "MLX, hybrid": Kind(partial(_mlx, "qwen3_next"), {}, 1e-3),
    "tabular": Kind(_tabular),
    "tabular replay": Kind(_replayed),
}
_QUICK = ("full", "quantised", "hybrid", "halves, window", "MLX, window", "tabular replay")
ALL = [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.long) for name in KINDS]
LLAMA = [name for name in ALL if not str(name.values[0]).startswith(("MLX", "tabular"))]


class Twins(NamedTuple):
    """The same model twice: with a context that is made larger and smaller, and with all of it."""

    model: LanguageModel
    whole: LanguageModel
    rounding: float


def load(name: str, folder: Path, **options: Any) -> LanguageModel:
    # Prompts are read in passes of as many tokens, whatever the size.
    how = LoadOptions(context_tokens=LARGE, batch_tokens=128, **KINDS[name].options)
    return KINDS[name].make(folder, replace(how, **options))


@pytest.fixture(scope="module", params=ALL)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    folder = tmp_path_factory.mktemp("twins")
    model, whole = (load(request.param, folder, first_tokens=first) for first in (SMALL, None))
    yield Twins(model, whole, KINDS[request.param].rounding)
    model.close()
    whole.close()


def emptied(twins: Twins) -> Twins:
    for model in twins[:2]:
        model.interrupt(False)
        model.truncate(0)
    twins.model.resize(SMALL)
    return twins


def check_step(twins: Twins, token: int = 4) -> None:
    """Both say the same after the token, which both keep."""
    got, expected = (step(model, token) for model in twins[:2])
    np.testing.assert_allclose(got, expected, rtol=0, atol=twins.rounding)


def test_it_begins_small_and_is_told(twins: Twins) -> None:
    facts = emptied(twins).model.facts
    assert facts.context_tokens == SMALL == twins.model.room
    assert (twins.whole.facts.context_tokens, twins.whole.facts.most_context_tokens) == (LARGE, LARGE)
    twins.model.resize(LARGE)
    assert twins.model.facts.kv_bytes == twins.whole.facts.kv_bytes >= facts.kv_bytes
    assert twins.model.room == LARGE


@pytest.mark.parametrize("name", LLAMA)
def test_what_is_to_come_is_told_and_its_types_are_chosen_by_it(name: str, tmp_path: Path) -> None:
    small, whole = (load(name, tmp_path, first_tokens=first) for first in (SMALL, None))
    assert small.facts.most_context_tokens == LARGE
    assert small.facts.most_kv_bytes == whole.facts.kv_bytes
    assert small.facts.kv_bytes < whole.facts.kv_bytes or name == "mamba"
    small.close()
    whole.close()


def test_a_prompt_that_is_too_long_fits_afterwards(twins: Twins) -> None:
    emptied(twins)
    tokens = tokens_for(twins.model, 700)
    twins.model.prefill(tokens[:200])
    with pytest.raises(ContextFullError):
        twins.model.prefill(tokens[200:])
    twins.model.resize(700 + 1)
    assert twins.model.length == 200
    twins.model.prefill(tokens[200:])
    twins.whole.prefill(tokens[:200])
    twins.whole.prefill(tokens[200:])
    check_step(twins)


def test_a_reply_goes_on_over_the_end(twins: Twins) -> None:
    emptied(twins)
    tokens = tokens_for(twins.model, SMALL - 3)
    for model in twins[:2]:
        model.prefill(tokens)
    for token in (4, 5, 6, 7, 7, 6, 5, 4):
        if not twins.model.room:
            twins.model.resize(2 * SMALL)
        check_step(twins, token)
    assert twins.model.length == SMALL + 5


def test_it_does_not_become_smaller_than_what_it_holds(twins: Twins) -> None:
    emptied(twins).model.resize(LARGE)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 600))
    with pytest.raises(ContextFullError, match="600 cached tokens"):
        twins.model.resize(599)
    with pytest.raises(ContextFullError):
        twins.model.resize(0)
    assert twins.model.facts.context_tokens == LARGE
    twins.model.resize(768)
    assert (twins.model.length, twins.model.facts.context_tokens) == (600, 768)
    check_step(twins)


def test_an_open_round_is_dropped(twins: Twins) -> None:
    emptied(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 20))
    twins.model.verify(TokenTree.chain(5, [6, 7]))
    twins.model.resize(512)
    assert twins.model.length == 20
    check_step(twins)


def test_a_copy_fits_contexts_of_other_sizes(twins: Twins) -> None:
    emptied(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 200))
    small, whole = twins.model.snapshot(), twins.whole.snapshot()
    twins.model.resize(LARGE)
    twins.model.prefill(tokens_for(twins.model, 300, 3))
    large = twins.model.snapshot()
    twins.model.restore(small)
    check_step(twins)
    twins.model.truncate(0)
    twins.model.resize(SMALL)
    twins.model.restore(whole)
    twins.whole.restore(small)
    check_step(twins)
    if not isinstance(twins.model, TabularModel) and "tabular" not in twins.model.facts.name:
        with pytest.raises(EdgespecError):
            twins.model.restore(large)
        assert twins.model.length == 0


def test_a_cancel_does_no_harm(twins: Twins) -> None:
    emptied(twins)
    for model in twins[:2]:
        model.prefill(tokens_for(model, 100))
    twins.model.interrupt(True)
    twins.model.resize(512)
    with pytest.raises(CancelledError):
        twins.model.verify(TokenTree.chain(4))
    twins.model.interrupt(False)
    assert twins.model.length == 100
    check_step(twins)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_made_after_close(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path, first_tokens=SMALL)
    model.close()
    with pytest.raises(ClosedError):
        model.resize(512)


rounds = st.lists(
    st.tuples(
        st.sampled_from(list(TREES.values())),
        st.integers(0, 11),
        st.integers(0, 10_000),
        st.sampled_from(["commit", "commit", "prefill", "truncate", "snapshot", "restore", "resize"]),
    ),
    min_size=1,
    max_size=10,
)


class TestHistories:
    @settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_any_history(self, twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]]) -> None:
        self.check(twins, history, 230)

    @pytest.mark.long
    @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_very_many_histories(
        self, twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(twins, history, history[0][2] % 300)

    @staticmethod
    def check(twins: Twins, history: list[tuple[tuple[int, ...], int, int, str]], start: int) -> None:
        emptied(twins)
        model, whole, rounding = twins
        kept = tokens_for(model, start, 9)

        model.resize(512)
        for one in (model, whole):
            one.prefill(kept)
        saved = (model.snapshot(), whole.snapshot(), list(kept))
        for shape, pick, seed, what in history:
            if not model.facts.capabilities.tree:
                shape = tuple(range(-1, len(shape) - 1))
            tree = tree_of(model, shape, seed)
            if what == "truncate":
                del kept[max(1, len(kept) - pick) :]
                for one in (model, whole):
                    cut(one, kept)
            elif what == "snapshot":
                saved = (model.snapshot(), whole.snapshot(), list(kept))
            elif what == "restore":
                first, second = saved[:2] if pick % 2 else (saved[1], saved[0])
                model.restore(first)
                whole.restore(second)
                kept = list(saved[2])
            elif what == "resize":
                model.resize(max(len(kept) + 64, seed % LARGE))
            elif what == "prefill":
                for one in (model, whole):
                    one.prefill(tree.tokens)
                kept += tree.tokens
            else:
                model.resize(max(model.facts.context_tokens, len(kept) + tree.width))
                logits = [one.verify(tree) for one in (model, whole)]
                for row in range(tree.width):
                    got, expected = (row_of(model, rows, row) for rows in logits)
                    np.testing.assert_allclose(got, expected, rtol=0, atol=rounding)
                node = pick % tree.width
                for one in (model, whole):
                    one.commit(path_to(tree, node))
                kept += tokens_to(tree, node)
            assert model.length == whole.length == len(kept)
        model.resize(max(model.facts.context_tokens, len(kept) + 1))
        check_step(twins)


def without_memory_beyond(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """No context can be made that is larger."""
    make = LlamaContext.make

    def limited(self: LlamaContext, plan: ContextPlan) -> None:
        if plan.tokens > tokens:
            self._free()
            raise MemoryBudgetError(f"no memory for {plan.tokens} tokens", "use fewer")
        make(self, plan)

    monkeypatch.setattr(LlamaContext, "make", limited)


class TestNoMemory:
    @pytest.mark.parametrize("name", LLAMA)
    def test_a_budget_is_kept(self, name: str, tmp_path: Path) -> None:
        model = load(name, tmp_path, first_tokens=SMALL)
        if name == "mamba":
            pytest.skip("its state is as large whatever the context")
        facts = model.facts
        model.close()
        enough = facts.weight_bytes + facts.most_kv_bytes + 64 * 2**20
        model = load(name, tmp_path, first_tokens=SMALL, memory_bytes=enough)
        tokens = tokens_for(model, 100)
        model.prefill(tokens)
        with pytest.raises(MemoryBudgetError, match="--context"):
            model.resize(1 << 30)
        assert (model.length, model.facts.context_tokens) == (100, SMALL)
        model.resize(LARGE)
        model.close()

    def test_what_other_programs_take_is_not_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load("full", tmp_path, first_tokens=SMALL)
        free = psutil.virtual_memory()._replace(available=model.facts.most_kv_bytes - 1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        with pytest.raises(MemoryBudgetError, match="a context of 1024 tokens takes"):
            model.resize(LARGE)
        model.resize(512)
        model.close()

    @pytest.mark.parametrize("name", LLAMA)
    def test_what_cannot_be_made_leaves_all_as_it_was(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, whole = (load(name, tmp_path, first_tokens=first) for first in (SMALL, None))
        pair = Twins(model, whole, KINDS[name].rounding)
        for one in pair[:2]:
            one.prefill(tokens_for(one, 200))
        with monkeypatch.context() as patch:
            without_memory_beyond(patch, SMALL)
            with pytest.raises(MemoryBudgetError, match="no memory for 512"):
                model.resize(512)
        assert (model.length, model.room, model.facts.context_tokens) == (200, SMALL - 200, SMALL)
        check_step(pair)
        model.resize(512)
        check_step(pair, 5)
        model.close()
        whole.close()

    @pytest.mark.parametrize("name", LLAMA)
    @pytest.mark.parametrize("failing", [1, 2])
    def test_where_nothing_can_be_made_errors_say_so(
        self, name: str, failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of two halves it may be the second alone."""
        model = load(name, tmp_path, first_tokens=SMALL)
        model.prefill(tokens_for(model, 100))
        made = 0
        make = LlamaContext.make

        def failed(self: LlamaContext, plan: ContextPlan) -> None:
            nonlocal made
            made += 1
            if made < failing:
                return make(self, plan)
            self._free()
            raise MemoryBudgetError("no memory at all", "close other programs")

        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "make", failed)
            if failing == 2 and not name.startswith("halves"):
                model.resize(512)
                assert model.length == 100
            else:
                with pytest.raises(MemoryBudgetError):
                    model.resize(512)
                assert model.length == 0 == model.room
                with pytest.raises(ContextFullError):
                    model.prefill([5, 6])
                with pytest.raises(ContextFullError):
                    model.verify(TokenTree.chain(5))
                model.truncate(0)
        model.close()


class TestViews:
    """What drafts on a target's memory goes on drafting when that is made larger."""

    def check(self, target: LanguageModel, view: LanguageModel, fresh: Callable[[], LanguageModel]) -> None:
        target.prefill(tokens_for(target, SMALL - 40))
        for size in (512, LARGE):
            tree = tree_of(target, TREES["binary"])
            view.verify(TokenTree(tree.tokens[:3], tree.parents[:3], tree.laws[:3]))
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

    @pytest.mark.parametrize("name", ["full", "halves, window"])
    def test_a_copy_with_fewer_bits(self, name: str, tmp_path: Path) -> None:
        target = load(name, tmp_path, first_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        how = LowBit(str(tmp_path / "copy.gguf"))
        view = target.self_draft(how)
        before = view.facts.kv_bytes
        self.check(target, view, lambda: target.self_draft(how))
        assert view.facts.kv_bytes > before
        target.close()

    @pytest.mark.parametrize("name", ["halves, window"])
    def test_the_lower_layers(self, name: str, tmp_path: Path) -> None:
        target = load(name, tmp_path, first_tokens=SMALL)
        how = EarlyExit(target.exit_layer)  # type: ignore[attr-defined]
        self.check(target, target.self_draft(how), lambda: target.self_draft(how))
        target.close()

    def test_a_window_stays_as_it_is(self, tmp_path: Path) -> None:
        target = load("full", tmp_path, first_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        how = LowBit(str(tmp_path / "copy.gguf"), 4, 16)
        view = target.self_draft(how)
        before = view.facts.kv_bytes
        self.check(target, view, lambda: target.self_draft(how))
        assert view.facts.kv_bytes == before
        target.close()

    def test_a_copy_that_finds_no_memory_falls_silent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = load("full", tmp_path, first_tokens=SMALL)
        quantise(tmp_path / "model.gguf", tmp_path / "copy.gguf", "Q4_0")
        view = target.self_draft(LowBit(str(tmp_path / "copy.gguf")))
        target.prefill(tokens_for(target, 200))
        lent = view._context  # type: ignore[attr-defined]
        make = LlamaContext.make

        def limited(self: LlamaContext, plan: ContextPlan) -> None:
            if self is lent and plan.tokens > SMALL:
                self._free()
                raise MemoryBudgetError("no memory", "use fewer")
            make(self, plan)

        monkeypatch.setattr(LlamaContext, "make", limited)
        target.resize(512)
        assert (view.room, target.room) == (56, 312)
        view.verify(TokenTree.chain(4))
        target.prefill(tokens_for(target, 100))
        assert view.room == 0
        with pytest.raises(ContextFullError):
            view.verify(TokenTree.chain(4))
        target.close()

    def test_it_is_the_target_s_to_grow(self, tmp_path: Path) -> None:
        target = load("halves", tmp_path, first_tokens=SMALL)
        with pytest.raises(CapabilityError, match="no memory of its own"):
            target.self_draft(EarlyExit(1)).resize(512)
        target.close()


class TestInterrupted:
    """A KeyboardInterrupt may come at any call: the cache is what it was, whatever size it has by then."""

    @pytest.mark.parametrize("name", ["full", "hybrid", "halves, window"])
    def test_at_any_call(self, name: str, tmp_path: Path) -> None:
        model, whole = (load(name, tmp_path, first_tokens=first) for first in (SMALL, None))
        for one in (model, whole):
            one.prefill(tokens_for(one, 100))
        calls = 0

        def at_call(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            path = Path(frame.f_code.co_filename)
            # What C calls back cannot raise.
            if event in ("call", "c_call") and "edgespec/backends" in str(path) and path.name != "native.py":
                calls -= 1
                if calls == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        wanted, interrupted = 1, True
        while interrupted:
            interrupted, calls = False, wanted
            sys.setprofile(at_call)
            try:
                model.resize(SMALL if wanted % 2 else 512)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
            assert model.length == 100
            assert model.room in (SMALL - 100, 512 - 100)
            wanted += 1 + wanted // 8
        assert wanted > 30
        check_step(Twins(model, whole, KINDS[name].rounding))
        model.close()
        whole.close()
