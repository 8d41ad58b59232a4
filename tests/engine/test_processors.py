"""The sampling chain as logits processors: same bits as the single function, candidates, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.engine.logits import HostLogits, candidates
from edgespec.engine.noise import Noise
from edgespec.engine.processors import (
    Candidates,
    LogitsProcessor,
    MinP,
    Temperature,
    TopK,
    TopP,
    TypicalP,
    build_processors,
)
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SETTING_RANGES, SamplingParams
from edgespec.errors import BackendError
from tests.engine import single_function_chain
from tests.engine.test_sampling import VOCAB, histories, rows, settings_of
from tests.raising import raises


class Forbid(LogitsProcessor):
    """Forbid some tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens)

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        return tokens, np.where(np.isin(tokens, self._tokens), -np.inf, logits)


class Counting(HostLogits):
    """Logits that record which rows were fetched in full, and how many tokens were requested."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        super().__init__(logits)
        self.requests: list[tuple[str, float]] = []

    def top(self, row: int, count: int) -> Candidates:
        self.requests.append(("top", count))
        return super().top(row, count)

    def above(self, row: int, margin: float) -> Candidates:
        self.requests.append(("above", margin))
        return super().above(row, margin)


class TestSameBitsAsOneFunction:
    @settings(max_examples=50)
    @given(rows(), settings_of((0.5, 1.0, 2.0)), histories)
    def test_distribution(self, row: NDArray[np.float32], params: SamplingParams, history: list[int]) -> None:
        assume(np.isfinite(single_function_chain.modified(row, params, history).max()))
        tokens, log_probs = single_function_chain.chain(row, params, history)
        weights = np.exp(log_probs - log_probs.max())
        got = Sampler(params, 0, history).distribution(HostLogits(row[None]), 0)
        kept = weights > 0  # Fetching fewer candidates may leave out tokens without probability.
        np.testing.assert_array_equal(got.tokens[got.probs > 0], tokens[kept])
        np.testing.assert_allclose(
            got.probs[got.probs > 0], weights[kept] / weights.sum(), rtol=1e-15, atol=0
        )

    @settings(max_examples=50)
    @given(rows(), settings_of(), histories, st.integers(0, 2**63 - 1), st.sampled_from([1, 2, 5]))
    def test_ranked_tokens(
        self, row: NDArray[np.float32], params: SamplingParams, history: list[int], seed: int, count: int
    ) -> None:
        assume(np.isfinite(single_function_chain.modified(row, params, history).max()))
        got = Sampler(params, seed, history).ranked(HostLogits(row[None]), 0, count)
        assert got == single_function_chain.ranked(row, params, history, seed, count)


class TestOrder:
    def test_the_chain_has_the_documented_order(self) -> None:
        params = SamplingParams(
            temperature=0.5, typical_p=0.9, presence_penalty=1.0, logit_bias={3: 1.0}, top_k=4
        )
        mask = Forbid([1])
        names = [type(each).__name__ for each in build_processors(params, [1], [mask])]
        assert names == [
            "Forbid", "Penalties", "LogitBias", "Temperature", "TopK", "TypicalP", "TopP", "MinP",
        ]  # fmt: skip

    def test_disabled_steps_are_left_out(self) -> None:
        off: dict[str, Any] = SamplingParams.disabled_filters()
        assert build_processors(SamplingParams(temperature=0.7, **off), []) == (Temperature(0.7),)
        assert build_processors(SamplingParams(temperature=0.0), []) == ()

    def test_every_filter_is_enabled_by_its_own_setting(self) -> None:
        off: dict[str, Any] = SamplingParams.disabled_filters()
        for name, value in off.items():
            low, high, _, _ = SETTING_RANGES[name]
            strict = SamplingParams(temperature=0.7, **{**off, name: high if value == low else low})
            assert len(build_processors(strict, [])) == 2, name

    def test_every_setting_has_a_range(self) -> None:
        assert {*SETTING_RANGES, "logit_bias"} == set(SamplingParams.names())

    def test_filters_of_equal_settings_are_equal(self) -> None:
        chains = [build_processors(SamplingParams(), []) for _ in range(2)]
        assert chains[0] == chains[1] == (Temperature(0.8), TopK(40), TopP(0.95), MinP(0.05))
        assert hash(chains[0]) == hash(chains[1])
        assert TypicalP(0.5) != TypicalP(0.6)


class TestFetchedCandidates:
    """Large vocabularies stay fast, because only tokens that can survive the filters are fetched."""

    ROW = np.random.default_rng(1).normal(size=(1, 5000)).astype(np.float32)

    def requests(self, params: SamplingParams, *processors: LogitsProcessor) -> list[tuple[str, float]]:
        logits = Counting(self.ROW)
        Sampler(params, 0, [7, 8, 9, 9], processors).token(logits, 0)
        return logits.requests

    def test_top_k_fetches_k_tokens(self) -> None:
        assert self.requests(SamplingParams(top_k=40)) == [("top", 40)]

    def test_penalised_and_biased_tokens_are_fetched_in_addition(self) -> None:
        params = SamplingParams(top_k=40, presence_penalty=1.0, logit_bias={9: 1.0, 11: -1.0})
        assert self.requests(params) == [("top", 40 + 4)]
        greedy = SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={9: 1.0, 11: -1.0})
        assert self.requests(greedy) == [("top", 1 + 4)]

    def test_min_p_alone_fetches_a_margin(self) -> None:
        ((kind, margin),) = self.requests(SamplingParams(temperature=0.5, top_k=0, top_p=1.0, min_p=0.1))
        assert kind == "above"
        assert margin == pytest.approx(-0.5 * np.log(0.1), rel=1e-4)

    def test_nucleus_filters_alone_fetch_the_row(self) -> None:
        assert self.requests(SamplingParams(top_k=0, top_p=0.9)) == [("top", 0)]

    @pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0)])
    def test_an_unknown_processor_sees_the_row(self, params: SamplingParams) -> None:
        assert self.requests(params, Forbid([1])) == [("top", 0)]


class TestForbiddenTokens:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_a_mask_works_beyond_the_best_tokens(self, temperature: float) -> None:
        row = np.arange(300, dtype=np.float32)[None] * 10
        sampler = Sampler(SamplingParams(temperature=temperature), 0, [1], [Forbid(range(2, 300))])
        assert sampler.token(HostLogits(row), 0) == 1
        assert sampler.ranked(HostLogits(row), 0, 5)[0] == 1
        assert sampler.distribution(HostLogits(row), 0).prob(1) == pytest.approx(1)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_an_error_explains_that_every_token_is_forbidden(self, temperature: float) -> None:
        logits = HostLogits(np.zeros((1, 300), np.float32))
        sampler = Sampler(SamplingParams(temperature=temperature), 0, [1, 2], [Forbid(range(300))])
        for call in (sampler.token, sampler.distribution):
            with raises(BackendError, "position 2", code="every_token_forbidden"):
                call(logits, 0)


class Overwrite(LogitsProcessor):
    """A faulty processor that replaces the first logit with `value`."""

    def __init__(self, value: float) -> None:
        self._value = value

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        return tokens, np.where(tokens == 0, self._value, logits)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=0, top_p=1.0, min_p=0.0),
    ],
)
def test_a_processor_that_returns_no_valid_logit_is_reported(value: float, params: SamplingParams) -> None:
    logits = HostLogits(np.zeros((1, 300), np.float32))
    sampler = Sampler(params, 0, [1], [Overwrite(value)])
    for call in (sampler.token, sampler.distribution):
        with raises(BackendError, value, code="logits_not_finite"):
            call(logits, 0)


class OnlyApply(LogitsProcessor):
    """A new filter as a contributor would first write it, with only `apply`."""

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        keep = tokens % 3 == 1
        return tokens[keep], logits[keep]


@settings(max_examples=50)
@given(rows(), settings_of(), histories, st.sampled_from([1, 3]))
def test_a_filter_with_apply_alone_is_correct(
    row: NDArray[np.float32], params: SamplingParams, history: list[int], count: int
) -> None:
    keep = np.arange(len(row)) % 3 == 1
    masked = np.where(keep, row, -np.inf).astype(np.float32)
    assume(np.isfinite(row[keep].max(initial=-np.inf)))
    assume(np.isfinite(single_function_chain.modified(masked, params, history).max()))
    got = Sampler(params, 5, history, [OnlyApply()]).ranked(HostLogits(row[None]), 0, count)
    assert got == Sampler(params, 5, history).ranked(HostLogits(masked[None]), 0, count)


def test_noise_selects_the_token() -> None:
    logits = HostLogits(np.zeros((1, VOCAB), np.float32))
    chain = build_processors(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), [])
    drawn = {logits.best(0, 1, chain, Noise(1, position))[0][0] for position in range(50)}
    assert len(drawn) > 30


class SayTwice(Forbid):
    """Names every token that it forbids twice."""

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        return np.sort(np.concatenate([self._tokens, self._tokens]))


def test_a_token_that_a_processor_names_twice_is_one_candidate() -> None:
    logits = HostLogits(np.arange(8, dtype=np.float32)[None])
    (tokens, values), peak = candidates(logits, 0, [SayTwice([2, 7]), TopK(2)])
    assert tokens.tolist() == [2, 3, 4, 5, 6, 7]
    assert values.tolist() == tokens.tolist()
    assert peak == 7.0
