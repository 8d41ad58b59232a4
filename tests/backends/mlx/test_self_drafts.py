"""Tests of MLX models that draft for themselves: replies equal plain decoding for every method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends import mlx
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ClosedError, OptionError
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.base import Drafter
from edgespec.methods.layerskip.drafter import exit_table
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit, SelfDraft
from edgespec.options.methods import head_names
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.conftest import in_thread, row
from tests.backends.mlx.tiny_checkpoints import KINDS, write_checkpoint
from tests.cases import covering, first
from tests.raising import raises

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
# The reply is long enough for the tiny models' sliding windows to drop rows.
TOKENS = 20
GREEDY = SamplingParams(temperature=0.0)


def reply(
    model: LanguageModel,
    drafter: Drafter | None,
    temperature: float = 0.0,
    rule: Acceptance | None = None,
    draft_length: int = 4,
    prompt: Sequence[int] = PROMPT,
) -> tuple[list[int], Stats]:
    """Return the reply to the prompt and its statistics."""
    model.truncate(0)
    model.prefill(prompt[:-1])
    if drafter:
        drafter.begin(prompt)
    stats = Stats()
    steps = decode(
        model,
        drafter,
        rule or Invariant(),
        Sampler(SamplingParams(temperature=temperature), 3, prompt),
        prompt[-1],
        vocab_size=model.facts.vocab_size,
        max_width=model.facts.capabilities.max_width,
        draft_length=draft_length,
        max_tokens=TOKENS,
        is_stop=lambda token: False,
        is_cancelled=lambda: False,
        stats=stats,
    )
    return [token for step in steps for token in step.tokens], stats


def loaded(folder: Path, kind: str, **more: Any) -> Any:
    """Load a tiny model with every self-draft method that it supports."""
    options = LoadOptions(context_tokens=512, low_bits=True, kv_type=more.pop("kv_type", "auto"))
    return mlx.load(str(write_checkpoint(folder / kind, kind, **more)), kind, options)


WAYS: dict[str, SelfDraft] = {
    "layerskip": EarlyExit(1),
    "lowbit": LowBit(),
    "lowbit window": LowBit(sink_tokens=2, window_tokens=8),
}
LAYERS = {"num_hidden_layers": 3}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"config": {**LAYERS, "head_dim": 32}, "kv_type": "q8_0"},
    "llama_sliding": {},
    "gemma2": {"config": LAYERS, "quantisation": ("affine", 8, 32)},
    "gemma3": {"quantisation": ("affine", 4, 32)},
    "deepseek_v3": {"config": LAYERS, "dtype": "bfloat16"},
}


class TestReplies:
    @pytest.fixture(scope="class")
    def model(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Any]:
        model = loaded(tmp_path_factory.mktemp("models"), request.param, **CHECKPOINTS[request.param])
        yield model
        model.close()

    @pytest.mark.long
    @pytest.mark.parametrize(("model", "way"), covering(list(CHECKPOINTS), list(WAYS)), indirect=["model"])
    def test_replies_equal_plain_decoding(self, model: Any, way: str) -> None:
        view = model.self_draft(WAYS[way])
        chains, trees = (
            ModelDrafter(view, model.facts.vocab_size, branches=branches, name=way)
            for branches in ((), (3, 2))
        )
        drafters = {0.0: chains, 0.8: trees, 1.2: CombinedDrafter([chains, NgramDrafter()])}
        accepted = 0
        for temperature, drafter in drafters.items():
            said, stats = reply(model, drafter, temperature)
            assert said == reply(model, None, temperature)[0]
            accepted += stats.accepted_tokens
        assert accepted > 0
        assert chains.memory_use.cache_bytes == 0

    @pytest.mark.parametrize("model", first(CHECKPOINTS), indirect=True)
    def test_rejection_mode_at_temperature_0_gives_the_same_tokens(self, model: Any) -> None:
        plain, _ = reply(model, None)
        for how in WAYS.values():
            drafter = ModelDrafter(model.self_draft(how), model.facts.vocab_size)
            assert reply(model, drafter, rule=Rejection(RandomDraws(1)))[0] == plain


class TestArchitectures:
    @pytest.mark.long
    @pytest.mark.parametrize("kind", sorted(KINDS.keys() - CHECKPOINTS.keys()))
    def test_each_architecture_drafts_for_itself_or_states_the_reason(
        self, tmp_path: Path, kind: str
    ) -> None:
        model = loaded(tmp_path, kind)
        can = model.facts.capabilities.self_draft_methods - {*head_names()}
        if kind in {"llama4", "mamba2", "falcon_h1", "qwen3_next", "nemotron_h", "lfm2", "jamba"} | {
            "granitemoehybrid"
        }:
            assert not can
            with pytest.raises(CapabilityError):
                model.self_draft(EarlyExit(1))
        else:
            assert can == {"layerskip", "lowbit"}
            plain, _ = reply(model, None)
            for how in (EarlyExit(1), LowBit()):
                drafter = ModelDrafter(model.self_draft(how), model.facts.vocab_size, branches=(2, 1))
                assert reply(model, drafter)[0] == plain
        model.close()


class TestDemo:
    """Tests with the bundled demo model, which has 8-bit weights and twelve layers."""

    @pytest.fixture(scope="class", params=["auto", pytest.param("q8_0", marks=pytest.mark.long)])
    def demo(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        options = LoadOptions(context_tokens=512, low_bits=True, kv_type=request.param)
        model = mlx.load(str(models_folder() / "demo-mlx"), "demo", options)
        yield model
        model.close()

    @pytest.mark.long
    def test_replies_are_the_same_and_drafts_are_accepted(self, demo: Any) -> None:
        prompt = demo.vocabulary.tokenize("Once upon a time there was", special=False, start=True)
        plain, _ = reply(demo, None, prompt=prompt)
        shares = {}
        for how in (EarlyExit(8), LowBit(window_tokens=16)):
            drafter = ModelDrafter(demo.self_draft(how), demo.facts.vocab_size)
            said, stats = reply(demo, drafter, prompt=prompt)
            assert said == plain
            shares[type(how)] = stats.accepted_tokens / stats.drafted_tokens
        assert min(shares.values()) > 0.2

    @pytest.mark.long
    def test_verification_does_not_rerun_the_lower_layers(self, demo: Any) -> None:
        rows: dict[int, int] = {0: 0, 11: 0}
        for layer in rows:
            count_rows(demo.caches.attention[layer], rows, layer)
        demo.truncate(0)
        demo.prefill(PROMPT)
        for layer in rows:
            count_rows(demo.caches.attention[layer], rows, layer)
        view = demo.self_draft(EarlyExit(6))
        for width in (1, 2, 3):
            view.verify(TokenTree.chain(9, [10, 11][: width - 1]), width - 1)
        assert rows == {0: 3, 11: 0}
        expected = demo.verify(TokenTree.chain(9, [10, 11, 12]))
        assert rows == {0: 4, 11: 4}
        got = expected.at(3, np.arange(demo.vocabulary.size))
        demo.truncate(len(PROMPT))
        plain = demo.verify(TokenTree.chain(9, [10, 11, 12]))
        np.testing.assert_array_equal(got, plain.at(3, np.arange(demo.vocabulary.size)))

    def test_drafting_waits_once_per_token_and_launches_the_next_step(self, demo: Any) -> None:
        demo.truncate(0)
        demo.prefill(PROMPT)
        view = demo.self_draft(EarlyExit(6))
        view.run_ahead(True)
        ((token,), _) = view.verify(TokenTree.chain(9)).best(0, 1)
        assert demo.caches.length == len(PROMPT) + 2
        view.verify(TokenTree.chain(9, [token]), 1)
        assert demo.caches.length == len(PROMPT) + 2
        demo.truncate(len(PROMPT))


def count_rows(cache: Any, rows: dict[int, int], layer: int) -> None:
    """Count the rows appended to a cache from now on."""
    append = cache.update_and_fetch
    rows[layer] = 0

    def counted(keys: Any, values: Any) -> Any:
        rows[layer] += keys.shape[2]
        return append(keys, values)

    cache.update_and_fetch = counted


actions = st.lists(
    st.tuples(
        st.sampled_from(["draft", "draft tree", "round", "tree", "truncate", "prefill", "plain", "stopped"]),
        st.sampled_from([EarlyExit(1), EarlyExit(3), LowBit(), LowBit(None, 2, 8)]),
        st.integers(3, 200),
    ),
    min_size=1,
    max_size=12,
)


class TestHistories:
    """Runs rounds of views and of the target in any order, and checks the target's logits."""

    @pytest.fixture(scope="class")
    def models(self, folder: Path) -> Iterator[list[Any]]:
        models = [
            loaded(folder, "gemma3", quantisation=("affine", 8, 32)),
            loaded(folder, "llama", config={"num_hidden_layers": 4, "head_dim": 32}, kv_type="q8_0"),
        ]
        yield models
        for model in models:
            model.close()

    @pytest.mark.long
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, 1), actions)
    def test_logits_equal_those_of_a_fresh_prefill(
        self, models: list[Any], which: int, history: list[tuple[str, SelfDraft, int]]
    ) -> None:
        model = models[which]
        model.truncate(0)
        tokens = [(31 * i + 7) % 200 + 3 for i in range(20)]
        model.prefill(tokens)
        for what, how, token in history:
            view = model.self_draft(how)
            chain = TokenTree.chain(token, [token + 1, token + 2])
            tree = TokenTree((token, 5, token + 1, 6, token + 2), (-1, 0, 0, 1, 2), (None,) * 5)
            if what == "draft":
                view.run_ahead(token % 2 == 0)
                view.verify(chain).best(2, 1)
            elif what == "plain":
                model.run_ahead(True)
                model.verify(TokenTree.chain(token)).best(0, 1)
                model.run_ahead(False)
                model.commit(())
                tokens.append(token)
            elif what == "draft tree":
                view.verify(TokenTree(tree.tokens[:3], tree.parents[:3], tree.draft_probs[:3]))
                view.verify(tree, 3)
            elif what == "stopped":
                view.verify(chain)
                for one in (view, model):
                    one.interrupt(True)
                    with pytest.raises(CancelledError):
                        one.verify(TokenTree.chain(token, [4]))
                    one.interrupt(False)
            elif what == "round":
                model.verify(chain)
                model.commit((1,))
                tokens += [token, token + 1]
            elif what == "tree":
                model.verify(tree)
                model.commit((2, 4))
                tokens += [token, token + 1, token + 2]
            elif what == "truncate":
                model.truncate(len(tokens) - token % 5)
                tokens = tokens[: len(tokens) - token % 5]
            else:
                model.prefill([token] * 9)
                tokens += [token] * 9
            assert model.length == len(tokens)
        got = row(model, TokenTree.chain(9, [10, 11]), 2)
        model.truncate(0)
        model.prefill(tokens)
        np.testing.assert_array_equal(got, row(model, TokenTree.chain(9, [10, 11]), 2))


class TestViews:
    def test_invalid_exit_layers_are_rejected(self, folder: Path) -> None:
        model = loaded(folder, "llama", config={"num_hidden_layers": 4})
        for how in (EarlyExit(0), EarlyExit(4)):
            with raises(OptionError, "draft with"):
                model.self_draft(how)
        assert model.layer_count == 4
        model.close()

    def test_a_view_has_no_cache_of_its_own(self, llama: LanguageModel) -> None:
        llama.truncate(0)
        llama.prefill(PROMPT)
        view = llama.self_draft(EarlyExit(1))
        view.prefill([4, 4])
        view.truncate(2)
        view.verify(TokenTree.chain(9))
        view.commit(())
        assert view.length == llama.length == len(PROMPT)
        assert view.facts.weight_bytes == view.facts.kv_bytes == 0
        for call in (lambda: view.restore(llama.snapshot()), lambda: view.remove_range(1, 2)):
            with raises(CapabilityError, "uses the"):
                call()
        with raises(CapabilityError, "self-draft"):
            view.self_draft(EarlyExit(1))
        view.close()
        with pytest.raises(ClosedError):
            view.verify(TokenTree.chain(9))
        assert np.isfinite(row(llama, TokenTree.chain(9))).all()
        llama.truncate(0)

    def test_a_draft_cannot_continue_a_round_that_the_target_ended(self, llama: LanguageModel) -> None:
        llama.truncate(0)
        llama.prefill(PROMPT)
        view, other = llama.self_draft(EarlyExit(1)), llama.self_draft(EarlyExit(1))
        view.verify(TokenTree.chain(9))
        other.verify(TokenTree.chain(9))
        with raises(BackendError, "discarded"):
            view.verify(TokenTree.chain(9, [10]), 1)
        llama.commit(())
        assert llama.length == len(PROMPT)

    def test_a_round_may_continue_in_another_thread(self, llama: LanguageModel) -> None:
        """MLX evaluates an array only in the thread that created it, so no array may stay lazy."""
        llama.truncate(0)
        llama.prefill(PROMPT)
        expected = row(llama, TokenTree.chain(9, [10, 11]), 2)
        llama.truncate(len(PROMPT))
        view = llama.self_draft(EarlyExit(1))
        for draft in (TokenTree.chain(9), TokenTree.chain(9, [10])):
            in_thread(lambda: view.verify(draft, draft.width - 1))  # noqa: B023
        np.testing.assert_array_equal(row(llama, TokenTree.chain(9, [10, 11]), 2), expected)
        llama.truncate(0)


class TestInterrupt:
    @pytest.mark.parametrize("way", [EarlyExit(2), LowBit()])
    def test_an_interrupted_pass_leaves_nothing_behind(self, folder: Path, way: SelfDraft) -> None:
        model = loaded(folder, "qwen2", config={"num_hidden_layers": 4})
        model.prefill(PROMPT)
        tree = TokenTree.chain(9, [10, 11])
        expected = row(model, tree, 2)
        model.truncate(len(PROMPT))
        for layer in (0, 1, 3):
            for mine in (True, False):
                view = model.self_draft(way)
                view.run_ahead(True)
                view.verify(TokenTree.chain(9)).best(0, 1)
                interrupt_at(model.caches.attention[layer])
                with contextlib.suppress(KeyboardInterrupt):
                    if mine:
                        view.verify(TokenTree.chain(9, [10]), 1)
                    else:
                        model.verify(tree)
                vars(model.caches.attention[layer]).pop("update_and_fetch")
                np.testing.assert_array_equal(row(model, tree, 2), expected)
                model.truncate(len(PROMPT))
        model.close()


def interrupt_at(cache: Any) -> None:
    """Raise KeyboardInterrupt right after rows have been appended to a cache."""
    append = cache.update_and_fetch

    def stopped(keys: Any, values: Any) -> None:
        append(keys, values)
        raise KeyboardInterrupt

    cache.update_and_fetch = stopped


class TestExits:
    def test_measure_exits_finds_the_best_exit_and_leaves_the_cache_unchanged(self) -> None:
        model: Any = mlx.load(str(models_folder() / "demo-mlx"), "demo", LoadOptions(context_tokens=512))
        text = "The river ran down from the hills and through the old town, where the market was."
        tokens = model.vocabulary.tokenize(text, special=False, start=True)
        model.prefill(PROMPT)
        before = model.snapshot().data
        agreements, layer_bytes, head_bytes = model.measure_exits(tokens)
        assert model.snapshot().data == before
        assert list(agreements) == list(range(1, 12))
        assert len(layer_bytes) == 12
        assert min(*layer_bytes, head_bytes) > 0
        assert sum(layer_bytes) + head_bytes <= model.facts.weight_bytes
        view = model.self_draft(EarlyExit(4))
        rows = view.verify(TokenTree.chain(tokens[0], tokens[1:]))
        early = [rows.top(node, 1)[0][0] for node in range(len(tokens))]
        rows = model.verify(TokenTree.chain(tokens[0], tokens[1:]))
        whole = [rows.top(node, 1)[0][0] for node in range(len(tokens))]
        assert agreements[4] == np.mean(np.array(early) == np.array(whole))
        model.close()

    def test_the_verdict_for_a_model_not_trained_for_early_exit(self, folder: Path) -> None:
        model = loaded(folder, "qwen3", config={"num_hidden_layers": 4})
        table = exit_table(*model.measure_exits([(31 * i + 7) % 200 + 3 for i in range(64)]))
        assert not table.is_faster
        assert "was not trained for early exit, so it would not be faster here" in table.verdict
        model.close()
