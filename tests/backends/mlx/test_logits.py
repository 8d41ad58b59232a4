"""Tests that logits on the device give the same results as logits on the host."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.mlx.logits import DeviceLogits, _device_chain
from edgespec.engine.logits import HostLogits
from edgespec.engine.noise import Noise, Stream, gumbel
from edgespec.engine.processors import (
    Candidates,
    LogitsProcessor,
    Temperature,
    TopK,
    TopP,
    TypicalP,
    build_processors,
)
from edgespec.engine.sampling_params import SamplingParams
from tests.cases import first

VOCAB = 500


def some_rows(seed: int, scale: float, coarse: bool, vocab: int = VOCAB) -> NDArray[np.float32]:
    """Generate three rows of logits. Coarse ones have many ties."""
    rows = np.random.default_rng(seed).normal(size=(3, vocab)) * scale
    return (np.round(rows * 2) / 2 if coarse else rows).astype(np.float32)


several = st.builds(some_rows, st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, 30.0]), st.booleans())
chains = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.4, 0.8, 1.2]),
    top_k=st.sampled_from([0, 1, 5, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.4]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.7]),
)


def best(
    logits: HostLogits | DeviceLogits, row: int, count: int, params: SamplingParams, seed: int, position: int
) -> tuple[list[int], float]:
    noise = Noise(seed, position) if params.temperature else None
    return logits.best(row, count, build_processors(params, []), noise)


class TestBest:
    @settings(max_examples=150)
    @given(several, chains, st.integers(0, 2**64 - 1), st.sampled_from([1, 2, 7]))
    def test_device_and_host_choose_the_same_tokens(
        self, rows: NDArray[np.float32], params: SamplingParams, seed: int, count: int
    ) -> None:
        # In single precision, a token at the edge of the nucleus may fall on either side.
        host, device = HostLogits(rows), DeviceLogits(mx.array(rows), [0, 1, 1])
        for row, depth in enumerate((0, 1, 1)):
            wanted, peak = best(host, row, count, params, seed, 10 + depth)
            got, its_peak = best(device, row, count, params, seed, 10 + depth)
            assert its_peak == peak
            assert (
                got == wanted or params.top_p < 1 or close(rows[row], params, seed, 10 + depth, got, wanted)
            )

    @pytest.mark.long
    def test_noise_equals_the_noise_of_the_host(self) -> None:
        flat = mx.zeros((1, 100_000))
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        for position in range(30):
            noise = gumbel(3, Stream.TOKEN, position, np.arange(100_000))
            got = best(DeviceLogits(flat, [0]), 0, 5, params, 3, position)[0]
            assert got == np.argsort(-noise, kind="stable")[:5].tolist()

    def test_samples_follow_the_distribution(self) -> None:
        from scipy.stats import chisquare

        law = np.array([0.4, 0.3, 0.2, 0.05, 0.05])
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        rows = mx.array(np.log(np.tile(law, (4000, 1))).astype(np.float32))
        logits = DeviceLogits(rows, range(4000))
        drawn = [best(logits, row, 1, params, 1, row)[0][0] for row in range(4000)]
        assert chisquare(np.bincount(drawn, minlength=5), law * 4000).pvalue > 1e-4

    @pytest.mark.parametrize("temperature", first([0.8, 0.0]))
    def test_logits_that_are_not_finite_are_noticed(self, temperature: float) -> None:
        rows = np.zeros((2, VOCAB), np.float32)
        rows[1, 7] = np.nan
        logits = DeviceLogits(mx.array(rows), [0, 1])
        assert not np.isfinite(best(logits, 1, 1, SamplingParams(temperature=temperature), 0, 0)[1])

    def test_the_next_step_is_launched_before_waiting_for_the_result(self) -> None:
        seen: list[int] = []
        rows = mx.array(some_rows(0, 3.0, coarse=False))
        logits = DeviceLogits(rows, [0, 1, 2], lambda token, _: seen.append(int(np.array(token)[0])))
        params = SamplingParams(temperature=0.0)
        first = best(logits, 0, 1, params, 0, 0)[0]
        assert not seen
        assert first == [int(np.array(rows)[0].argmax())]
        logits = DeviceLogits(rows, [0, 1, 2], lambda token, _: seen.append(int(np.array(token)[0])))
        assert best(logits, 2, 1, params, 0, 2)[0] == seen


def close(
    row: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    got: list[int],
    wanted: list[int],
) -> bool:
    """Return whether two rankings differ by rounding only."""
    if params.temperature == 0.0 or len(got) != len(wanted):
        return False
    logits = row.astype(np.float64) / params.temperature
    scores = [logits[t] + gumbel(seed, Stream.TOKEN, position, np.array(t)) for t in (got, wanted)]
    return bool(np.allclose(scores[0], scores[1], rtol=1e-5, atol=1e-4))


class TestCandidates:
    @settings(max_examples=100)
    @given(several, st.sampled_from([0, 1, 3, 40, 480, 490, 600]))
    def test_top_returns_the_largest_logits_and_all_ties(self, rows: NDArray[np.float32], count: int) -> None:
        device = DeviceLogits(mx.array(rows), [0, 1, 2])
        for row in range(3):
            tokens, values = device.top(row, count)
            assert np.all(np.diff(tokens) > 0)
            assert np.array_equal(values, rows[row][tokens])
            floor = np.sort(rows[row])[-min(count or VOCAB, VOCAB)]
            assert set(np.flatnonzero(rows[row] >= floor)) <= set(tokens.tolist())

    @settings(max_examples=100)
    @given(several, st.floats(0, 50))
    def test_above_includes_logits_at_the_margin(self, rows: NDArray[np.float32], margin: float) -> None:
        device = DeviceLogits(mx.array(rows), [0, 1, 2])
        for row in range(3):
            tokens, values = device.above(row, margin)
            assert np.array_equal(values, rows[row][tokens])
            wanted = np.flatnonzero(rows[row].astype(np.float64) >= float(rows[row].max()) - margin)
            assert set(wanted) <= set(tokens.tolist())

    def test_at_and_limit_vocab(self) -> None:
        rows = some_rows(1, 3.0, coarse=False)
        device = DeviceLogits(mx.array(rows), [0, 1, 2])
        assert device.at(1, np.array([4, 2, 499])).tolist() == rows[1][[4, 2, 499]].tolist()
        few = device.limit_vocab(10)
        assert (len(few), few.vocab_size) == (3, 10)
        assert best(few, 2, 1, SamplingParams(temperature=0.0), 0, 0)[0] == [int(rows[2][:10].argmax())]
        assert device.limit_vocab(VOCAB) is device

    def test_half_precision_is_widened_not_rounded(self) -> None:
        rows = mx.array(some_rows(2, 3.0, coarse=False)).astype(mx.bfloat16)
        device = DeviceLogits(rows, [0, 1, 2])
        tokens, values = device.top(0, 3)
        assert values.tolist() == np.array(rows[0].astype(mx.float32))[tokens].tolist()


class TestDeviceChain:
    """Sampling chains that run on the device. All others run on the host in double precision."""

    def test_common_chains_run_on_the_device(self) -> None:
        noise = Noise(1, 2)
        assert _device_chain(build_processors(SamplingParams(), []), noise) == (0.8, 40, 0.95, 0.05)
        no_filters = SamplingParams(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
        assert _device_chain(build_processors(no_filters, []), noise) == (0.5, 0, 1.0, 0.0)
        assert _device_chain((), None) == (0.0, 0, 1.0, 0.0)

    @pytest.mark.parametrize(
        "chain",
        [
            (Temperature(0.8), TypicalP(0.9)),
            (Temperature(0.8), TopP(0.9), TopK(5)),
            (Temperature(0.8), TopK(5), TopK(5)),
            (TopK(5),),
            build_processors(SamplingParams(presence_penalty=1.0), [1]),
            build_processors(SamplingParams(logit_bias={3: 1.0}), [1]),
        ],
        ids=[
            "typical-p",
            "top-p before top-k",
            "top-k twice",
            "without temperature",
            "penalties",
            "logit bias",
        ],
    )
    def test_other_chains_run_on_the_host(self, chain: tuple[LogitsProcessor, ...]) -> None:
        assert _device_chain(chain, Noise(1, 2)) is None
        rows = some_rows(3, 3.0, coarse=False)
        device, host = DeviceLogits(mx.array(rows), [0, 1, 2]), HostLogits(rows)
        assert device.best(1, 3, chain, Noise(1, 2)) == host.best(1, 3, chain, Noise(1, 2))

    def test_a_changed_filter_is_not_mistaken_for_its_base_class(self) -> None:
        class Least(TopK):
            def apply(self, candidates: Candidates) -> Candidates:
                tokens, log_probs = candidates
                return tokens[[log_probs.argmin()]], log_probs[[log_probs.argmin()]]

            def max_candidates(self) -> None:  # type: ignore[override]
                return None

        rows = some_rows(3, 3.0, coarse=False)
        got, _ = DeviceLogits(mx.array(rows), [0, 1, 2]).best(1, 1, (Temperature(1.0), Least(5)), Noise(1, 2))
        assert got == [int(rows[1].argmin())]
