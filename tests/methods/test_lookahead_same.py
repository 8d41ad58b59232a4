"""Lookahead decoding changes neither replies nor their distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import Reply
from edgespec.backends import llamacpp, mlx
from edgespec.engine.acceptance import Invariant, RandomDraws, Rejection
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.base import Drafter
from edgespec.methods.lookahead.drafter import LookaheadDrafter, LookaheadWindow
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.model.model_facts import Capabilities
from edgespec.store.catalogue import models_folder
from tests.cases import first
from tests.engine.exact import (
    AllChances,
    ExactLogits,
    ExactModel,
    ExactSampler,
    assert_law,
    random_table,
)
from tests.engine.test_rejection import (
    SAMPLERS,
    SIGNIFICANT,
    exact_law,
    g_test,
    replies,
)
from tests.tables import PROMPT, VOCAB, near, sampling_settings, table, with_drafter

FREE = Capabilities(True, True)
SHAPES = [
    LookaheadWindow(2, 3, 2),
    LookaheadWindow(1, 2, 1),
    LookaheadWindow(5, 4, 3),
    LookaheadWindow(3, 2, 5),
    LookaheadWindow(1, 5, 4),
    LookaheadWindow(4, 3, 1),
]
SETTINGS = sampling_settings((0.0, 0.8, 1.2))


def forced(window: LookaheadWindow, able: Capabilities = FREE) -> LookaheadDrafter:
    return LookaheadDrafter(able, window=window)


def same(got: Reply, expected: Reply) -> None:
    assert got.tokens == expected.tokens
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)


class TestTableModels:
    @pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
    @pytest.mark.parametrize("window", first(SHAPES, 2), ids=str)
    def test_replies_are_identical_with_every_window(
        self, window: LookaheadWindow, sampling: dict[str, Any]
    ) -> None:
        accepted = 0
        for seed in range(2):
            with with_drafter(table(seed), forced(window)) as pair:
                asked: dict[str, Any] = {"seed": seed, "max_tokens": 40, **sampling}
                expected = pair.generate(PROMPT, method="none", **asked)
                for draft_length in (1, 2, 4, 8):
                    got = pair.generate(PROMPT, method="lookahead", draft_length=draft_length, **asked)
                    same(got, expected)
                    accepted += got.stats.accepted_tokens
                if sampling["temperature"] == 0:
                    got = pair.generate(PROMPT, method="lookahead", acceptance="rejection", **asked)
                    same(got, expected)
        assert accepted

    @settings(max_examples=30)
    @given(st.data())
    def test_replies_are_identical_with_random_windows_and_limits(self, data: st.DataObject) -> None:
        window = LookaheadWindow(
            data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5)), data.draw(st.integers(1, 5))
        )
        context = data.draw(st.integers(7, 40))
        asked: dict[str, Any] = {
            "seed": data.draw(st.integers(0, 5)),
            "max_tokens": data.draw(st.integers(1, 40)),
            "temperature": data.draw(st.sampled_from([0.0, 0.8, 1.2])),
        }
        target = table(data.draw(st.integers(0, 3)), context_tokens=context)
        with with_drafter(target, forced(window)) as pair:
            expected = pair.generate(PROMPT, method="none", **asked)
            got = pair.generate(
                PROMPT, method="lookahead", draft_length=data.draw(st.integers(1, 9)), **asked
            )
        same(got, expected)

    @settings(max_examples=20)
    @given(st.sampled_from(SHAPES), st.integers(1, 12), st.integers(1, 5), st.integers(0, 4))
    def test_trees_may_be_cut_to_any_width(
        self, window: LookaheadWindow, width: int, branches: int, seed: int
    ) -> None:
        """The loop removes nodes that exceed a pass, and the window continues with the rest."""
        said = []
        for drafter in (None, forced(window)):
            target = table(seed)
            tokens = [0, 1, 2, 0, 1]
            target.prefill(tokens[:-1])
            if drafter:
                drafter.begin(tokens)
            steps = decode(
                target,
                drafter,
                Invariant(),
                Sampler(SamplingParams(temperature=0.8), seed, tokens),
                tokens[-1],
                vocab_size=VOCAB,
                max_width=width,
                max_branches=branches,
                draft_length=7,
                max_tokens=50,
                is_stop=lambda token: False,
                is_cancelled=lambda: False,
                stats=Stats(),
            )
            said.append([token for step in steps for token in step.tokens])
        assert said[0] == said[1]

    @pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
    def test_combined_with_a_draft_model(self, sampling: dict[str, Any]) -> None:
        target = table(2)
        both = CombinedDrafter([ModelDrafter(near(table(2), 3), VOCAB), forced(LookaheadWindow(3, 3, 2))])
        with with_drafter(target, both) as pair:
            asked: dict[str, Any] = {"seed": 1, "max_tokens": 60, **sampling}
            expected = pair.generate(PROMPT, method="none", **asked)
            same(pair.generate(PROMPT, method="lookahead", draft_length=6, **asked), expected)

    def test_a_target_without_trees_gets_chains(self) -> None:
        target = table(1, tree=False)
        drafter = forced(LookaheadWindow(0, 3, 1), target.facts.capabilities)
        assert "reuse phrases from the text, because disabled by a constructor argument" in drafter.note()
        with with_drafter(target, drafter) as pair:
            asked: dict[str, Any] = {"seed": 1, "max_tokens": 60, "temperature": 0.0}
            expected = pair.generate(PROMPT, method="none", **asked)
            got = pair.generate(PROMPT, method="lookahead", **asked)
        same(got, expected)
        assert got.stats.accepted_tokens

    def test_a_reply_does_not_depend_on_the_previous_one(self) -> None:
        asked: dict[str, Any] = {"seed": 4, "max_tokens": 40, "temperature": 1.0, "acceptance": "rejection"}
        with with_drafter(table(1), forced(LookaheadWindow(4, 3, 3))) as pair:
            first = pair.generate(PROMPT, method="lookahead", **asked)
            pair.generate("fedcba", method="lookahead", **asked)
            assert pair.generate(PROMPT, method="lookahead", **asked).tokens == first.tokens


@pytest.fixture(scope="module", params=["llama.cpp", "MLX"])
def demo(request: pytest.FixtureRequest, demo_target: Path) -> Iterator[LanguageModel]:
    options = LoadOptions(context_tokens=512, max_branches=8)
    made: LanguageModel
    if request.param == "MLX":
        made = mlx.load(str(models_folder() / "demo-mlx-draft"), "demo-mlx-draft", options)
    else:
        made = llamacpp.load(str(demo_target), "demo", options)
    yield made
    made.close()


class _Kept:
    """A model that is not closed with its runtime."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def close(self) -> None:
        self._model.truncate(0)


HOWTO = "How do I list files by size?"


class TestRealModels:
    def run(self, demo: LanguageModel, window: LookaheadWindow) -> Any:
        target: Any = _Kept(demo)
        return with_drafter(target, LookaheadDrafter(demo.facts.capabilities, window=window))

    @pytest.mark.parametrize(
        ("window", "sampling"),
        [
            (LookaheadWindow(4, 3, 3), SETTINGS["T 0.0"]),
            (LookaheadWindow(3, 4, 4), SETTINGS["T 0.8"]),
            (LookaheadWindow(4, 3, 3), SETTINGS["T 1.2, penalties"]),
        ],
    )
    def test_replies_are_identical(
        self, demo: LanguageModel, window: LookaheadWindow, sampling: dict[str, Any]
    ) -> None:
        with self.run(demo, window) as pair:
            asked: dict[str, Any] = {"seed": 3, "max_tokens": 24, **sampling}
            expected = pair.generate(HOWTO, method="none", **asked)
            got = pair.generate(HOWTO, method="lookahead", draft_length=8, **asked)
            same(got, expected)
            assert got.stats.drafted_tokens > got.stats.target_passes

    def test_greedy_replies_are_identical_in_rejection_mode(self, demo: LanguageModel) -> None:
        with self.run(demo, LookaheadWindow(3, 4, 4)) as pair:
            asked: dict[str, Any] = {"seed": 3, "max_tokens": 16, "temperature": 0.0}
            expected = pair.generate(HOWTO, method="none", **asked)
            got = pair.generate(HOWTO, method="lookahead", draft_length=8, acceptance="rejection", **asked)
            same(got, expected)
            drawn = pair.generate(HOWTO, method="lookahead", acceptance="rejection", seed=1, max_tokens=12)
            assert drawn.tokens


class _TokenSampler(ExactSampler):
    """Samples the most probable token for the window."""

    def ranked(self, logits: ExactLogits, row: int, count: int) -> list[int]:
        assert tuple(self.history) == logits.paths[row], "the sampler is at another position"
        return super().ranked(logits, row, count)


class TestUnbiased:
    """In rejection mode, the window and the pool depend on earlier rounds with other random streams."""

    @pytest.mark.parametrize(
        "window", [LookaheadWindow(1, 2, 1), LookaheadWindow(2, 2, 2), LookaheadWindow(2, 3, 2)], ids=str
    )
    @pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a draft model"])
    @pytest.mark.parametrize("seed", range(2))
    def test_the_distribution_is_exact(self, window: LookaheadWindow, seed: int, beside: bool) -> None:
        target = random_table(seed + 5, 2, zeros=0)
        chance = AllChances()
        drafted = 0

        def experiment() -> tuple[int, ...]:
            nonlocal drafted
            drafter: Drafter = forced(window)
            stats = Stats()
            if beside:
                draft: Any = ExactModel(random_table(seed + 9, 2, zeros=0), 2)
                drafter = CombinedDrafter([ModelDrafter(draft, 2), drafter])
            drafter.begin((0,))
            steps = decode(
                ExactModel(target, 2),  # type: ignore[arg-type]
                drafter,
                Rejection(chance),
                _TokenSampler((0,)),  # type: ignore[arg-type]
                0,
                vocab_size=2,
                draft_length=2 if beside else 3,
                max_tokens=3 if beside else 4,
                is_stop=lambda token: False,
                is_cancelled=lambda: False,
                stats=stats,
            )
            said = tuple(token for step in steps for token in step.tokens)
            drafted += stats.drafted_tokens
            return said

        emitted: dict[tuple[int, ...], Fraction] = chance.outcomes(experiment)
        assert drafted
        assert_law(emitted, target, (0,), 2)

    @pytest.mark.parametrize("sampler", first(SAMPLERS, 2))
    def test_the_distribution_with_random_sampling(self, sampler: str) -> None:
        def rule(seed: int) -> Rejection:
            return Rejection(RandomDraws(seed))

        drawn = Counter(replies(rule, forced(LookaheadWindow(2, 3, 2)), SAMPLERS[sampler], 1500))
        assert g_test(drawn, exact_law(SAMPLERS[sampler])) > SIGNIFICANT / len(SAMPLERS)
