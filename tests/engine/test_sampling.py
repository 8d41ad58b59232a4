"""The sampler compared with a slow reference, its push and pop, and the log-probabilities of tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax

from edgespec.engine.logits import HostLogits, token_logprob
from edgespec.engine.noise import Stream, uniform
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import BackendError, OptionError
from tests.raising import raises

VOCAB = 200
# Multiples of a quarter give many exact ties, and no two numbers that differ only by rounding.
quarters = st.integers(-24, 24).map(lambda n: n / 4)


@st.composite
def rows(draw: st.DrawFn) -> NDArray[np.float32]:
    """Draw a row of logits with ties and sometimes with tokens at -inf."""
    size = draw(st.integers(2, VOCAB))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    row = (random.integers(-24, 24, size) / 4).astype(np.float32)
    if draw(st.booleans()):
        row[random.integers(0, size, size // 4)] = -np.inf
        row[random.integers(0, size)] = 3.0
    return row


@st.composite
def settings_of(draw: st.DrawFn, temperatures: Sequence[float] = (0.0, 0.5, 1.0, 2.0)) -> SamplingParams:
    maybe = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from(temperatures)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 40, VOCAB, 10 * VOCAB])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.7, 0.3, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])) if maybe else 1.0,
        presence_penalty=draw(quarters) if maybe else 0.0,
        frequency_penalty=draw(quarters) if maybe else 0.0,
        penalty_window=draw(st.sampled_from([-1, 0, 1, 2, 5, 64])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB + 20), st.one_of(quarters, st.just(-math.inf)), max_size=4)
        ),
    )


histories = st.lists(st.integers(0, VOCAB + 20), max_size=12)


def reference(row: NDArray[np.float32], params: SamplingParams, history: Sequence[int]) -> dict[int, float]:
    """Compute the distribution in plain Python over all tokens, applying filters in the documented order."""
    width = len(history) if params.penalty_window < 0 else min(len(history), params.penalty_window)
    counts = Counter(history[len(history) - width :])
    logits = {}
    for token, logit in enumerate(row.astype(float)):
        if counts[token]:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
            logit -= params.presence_penalty + counts[token] * params.frequency_penalty
        logits[token] = logit + params.logit_bias.get(token, 0.0)
    best = max(logits.values())
    assume(math.isfinite(best))
    if params.temperature == 0:
        return {min(token for token, logit in logits.items() if logit == best): 1.0}
    weights = {token: math.exp((logit - best) / params.temperature) for token, logit in logits.items()}
    if params.top_k:
        ranked = sorted(weights, key=lambda token: (-logits[token], token))
        weights = {token: weights[token] for token in ranked[: params.top_k]}
    if params.typical_p < 1:
        law = _normalised(weights)
        entropy = -sum(p * math.log(p) for p in law.values() if p)
        surprise = {token: abs(-math.log(max(p, 1e-300)) - entropy) for token, p in law.items()}
        weights = _held(weights, law, sorted(law, key=lambda t: (round(surprise[t], 9), t)), params.typical_p)
        gaps = sorted(surprise.values())
        assume(all(b - a > 1e-6 or b - a < 1e-10 for a, b in pairwise(gaps)))
    if params.top_p < 1:
        law = _normalised(weights)
        weights = _held(weights, law, sorted(law, key=lambda t: (-logits[t], t)), params.top_p)
    if params.min_p > 0:
        edge = max(weights.values()) * params.min_p
        assume(all(abs(weight - edge) > 1e-9 or params.min_p == 1 for weight in weights.values()))
        weights = {token: weight for token, weight in weights.items() if weight >= edge * (1 - 1e-12)}
    return _normalised(weights)


def _normalised(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _held(
    weights: dict[int, float], law: dict[int, float], order: Sequence[int], mass: float
) -> dict[int, float]:
    kept, held = {}, 0.0
    for token in order:
        kept[token] = weights[token]
        held += law[token]
        assume(abs(held - mass) > 1e-9)
        if held >= mass:
            break
    return kept


class TestAgainstTheReference:
    @settings(max_examples=100)
    @given(rows(), settings_of(), histories)
    def test_distribution_equals_the_reference(
        self, row: NDArray[np.float32], params: SamplingParams, history: list[int]
    ) -> None:
        expected = reference(row, params, history)
        law = Sampler(params, 0, history).distribution(HostLogits(row[None]), 0)
        assert np.all(np.diff(law.tokens) > 0)
        assert law.probs.sum() == pytest.approx(1)
        got = dict(zip(law.tokens.tolist(), law.probs.tolist(), strict=True))
        for token in expected.keys() | got.keys():
            assert got.get(token, 0.0) == pytest.approx(expected.get(token, 0.0), abs=1e-9)

    @settings(max_examples=60)
    @given(rows(), settings_of(), histories, st.integers(0, 2**63 - 1))
    def test_token_equals_the_reference(
        self, row: NDArray[np.float32], params: SamplingParams, history: list[int], seed: int
    ) -> None:
        expected = reference(row, params, history)

        def score(token: int) -> float:
            if not expected[token]:
                return -math.inf
            if params.temperature == 0:
                return 0.0
            return math.log(expected[token]) - math.log(
                -math.log(uniform(seed, Stream.TOKEN, len(history), token))
            )

        best = max(expected, key=score)
        sampler = Sampler(params, seed, history)
        logits = HostLogits(row[None])
        assert sampler.token(logits, 0) == best
        ranked = sampler.ranked(logits, 0, 3)
        assert ranked[0] == best
        assert len(set(ranked)) == len(ranked)

    @pytest.mark.parametrize("size", [63, 64, 65, 1000, 8192, 50_001])
    @pytest.mark.parametrize("count", [1, 2, 40, 64, 700])
    def test_top_returns_the_largest_logits_and_all_ties(self, size: int, count: int) -> None:
        random = np.random.default_rng(size * count)
        row = (random.integers(-200, 200, size) / 8).astype(np.float32)
        tokens, values = HostLogits(row[None]).top(0, count)
        assert np.all(np.diff(tokens) > 0)
        assert np.array_equal(values, row[tokens])
        floor = np.sort(row)[-min(count, size)]
        assert set(np.flatnonzero(row >= floor)) <= set(tokens.tolist())

    @settings(max_examples=80)
    @given(st.integers(0, 2**32 - 1), st.floats(0, 50), st.sampled_from([1.0, 40.0, 3000.0]))
    @example(seed=1, margin=0.0, scale=3000.0)
    def test_above_includes_logits_exactly_at_the_margin(
        self, seed: int, margin: float, scale: float
    ) -> None:
        row = (np.random.default_rng(seed).normal(size=500) * scale).astype(np.float32)
        tokens, _ = HostLogits(row[None]).above(0, margin)
        wanted = np.flatnonzero(row.astype(np.float64) >= float(row.max()) - margin)
        assert set(wanted) <= set(tokens.tolist())


class TestPushAndPop:
    """After any push and pop, the sampler equals a new one at the same path."""

    @settings(max_examples=80)
    @given(rows(), settings_of(), histories, st.lists(st.integers(0, VOCAB), max_size=12))
    def test_pop_undoes_push(
        self, row: NDArray[np.float32], params: SamplingParams, history: list[int], path: list[int]
    ) -> None:
        reference(row, params, history)
        logits = HostLogits(row[None])
        walked, fresh = Sampler(params, 1, history), Sampler(params, 1, history)
        for token in path:
            walked.push(token)
        walked.pop(len(path))
        assert walked.position == fresh.position
        assert walked.token(logits, 0) == fresh.token(logits, 0)
        a, b = walked.distribution(logits, 0), fresh.distribution(logits, 0)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.probs, b.probs)

    @settings(max_examples=80)
    @given(
        rows(),
        settings_of(),
        histories,
        st.lists(st.one_of(st.integers(0, VOCAB), st.just(-1)), max_size=24),
    )
    def test_any_walk_equals_a_new_sampler_at_its_end(
        self, row: NDArray[np.float32], params: SamplingParams, history: list[int], walk: list[int]
    ) -> None:
        sampler, path = Sampler(params, 1, history), list(history)
        for step in walk:
            if step >= 0:
                sampler.push(step)
                path.append(step)
            elif len(path) > 0:
                sampler.pop(1)
                path.pop()
        reference(row, params, path)
        logits = HostLogits(row[None])
        expected = Sampler(params, 1, path).distribution(logits, 0)
        got = sampler.distribution(logits, 0)
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_array_equal(got.probs, expected.probs)

    def test_penalties_see_the_draft_tokens_of_the_same_path(self) -> None:
        params = SamplingParams(temperature=0.0, presence_penalty=5.0)
        logits = HostLogits(np.array([[1.0, 0.0, 0.0]], np.float32))
        sampler = Sampler(params, 0, [2])
        assert sampler.token(logits, 0) == 0
        sampler.push(0)
        assert sampler.token(logits, 0) == 1
        sampler.pop(1)
        assert sampler.token(logits, 0) == 0


class TestInvalidNumbers:
    @pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.0},
            {"temperature": 0.0, "presence_penalty": 1.0},
            {"top_k": 40},
            {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
            {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
        ],
    )
    def test_non_finite_logits_raise_an_error(self, bad: float, options: dict[str, float]) -> None:
        logits = HostLogits(np.full((1, 300), bad, np.float32))
        sampler = Sampler(SamplingParams(**options), 0, [1])  # type: ignore[arg-type]
        with raises(BackendError, code="logits_not_finite"):
            sampler.token(logits, 0)

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 100.0])
    def test_extreme_temperatures(self, temperature: float) -> None:
        logits = HostLogits(np.array([[1.0, 7.0, 7.0, -20.0, 3.0]], np.float32))
        for options in ({}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"typical_p": 0.5}):
            params = SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]
            law = Sampler(params, 0, [0]).distribution(logits, 0)
            assert law.probs.sum() == pytest.approx(1)
            if temperature < 1:
                assert set(law.tokens[law.probs > 0].tolist()) <= {1, 2}

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": -0.1},
            {"temperature": math.nan},
            {"temperature": math.inf},
            {"temperature": "hot"},
            {"temperature": True},
            {"top_k": 1.5},
            {"top_k": -1},
            {"top_p": 1.1},
            {"min_p": -0.1},
            {"repetition_penalty": 0.0},
            {"penalty_window": -2},
            {"logit_bias": {-1: 0.0}},
            {"logit_bias": {1: math.inf}},
            {"logit_bias": {1: math.nan}},
            {"logit_bias": {1: "much"}},
            {"logit_bias": {"one": 1.0}},
            {"logit_bias": None},
        ],
    )
    def test_invalid_settings_raise_a_one_line_error(self, options: dict[str, object]) -> None:
        with pytest.raises(OptionError) as caught:
            SamplingParams(**options)  # type: ignore[arg-type]
        assert next(iter(options)) in str(caught.value)
        assert "\n" not in str(caught.value)


ROWS = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32) * 5


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_they_are_the_logarithms_of_the_softmax(count: int) -> None:
    for row in range(len(ROWS)):
        expected = log_softmax(ROWS[row].astype(np.float64))
        got = token_logprob(HostLogits(ROWS), row, 7, count)
        assert got.token == 7
        assert got.logprob == pytest.approx(expected[7], rel=1e-12)
        best = np.argsort(-expected)[:count]
        assert [token for token, _ in got.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in got.top], expected[best], rtol=1e-12)


def test_of_equal_logits_the_lowest_ids_come_first() -> None:
    got = token_logprob(HostLogits(np.zeros((1, 200), np.float32)), 0, 150, 3)
    assert got.logprob == pytest.approx(-math.log(200))
    assert [token for token, _ in got.top] == [0, 1, 2]


def test_large_logits_do_not_overflow() -> None:
    got = token_logprob(HostLogits(np.array([[1e30, -1e30]], np.float32)), 0, 0, 2)
    assert got.logprob == 0.0
    assert got.top[1][1] < -1e29
