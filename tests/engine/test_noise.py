"""The counter-based noise is uniform, independent and the same for scalar and vector calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from edgespec.engine import noise
from edgespec.engine.noise import Stream, gumbel, uniform

COUNT = 20_000


def _uniforms(which: str) -> NDArray[np.float64]:
    """Return numbers whose counters differ in one word only."""
    ask: Callable[[int], float] = {
        "token": lambda i: uniform(5, Stream.TOKEN, 17, i),
        "position": lambda i: uniform(5, Stream.TOKEN, i, 17),
        "seed": lambda i: uniform(i, Stream.TOKEN, 5, 17),
        "large seed": lambda i: uniform((i << 40) + 1, Stream.TOKEN, 5, 17),
        "stream and position": lambda i: uniform(5, Stream(i % 4), i // 4, 0),
    }[which]
    return np.array([ask(i) for i in range(COUNT)])


@pytest.mark.parametrize("which", ["token", "position", "seed", "large seed", "stream and position"])
class TestUniformity:
    def test_numbers_are_uniform_along_every_word_of_the_counter(self, which: str) -> None:
        assert stats.kstest(_uniforms(which), "uniform").pvalue > 1e-4

    def test_successive_numbers_are_independent(self, which: str) -> None:
        numbers = _uniforms(which)
        for lag in (1, 2, 3, 4, 64):
            grid, _, _ = np.histogram2d(numbers[:-lag], numbers[lag:], bins=8, range=[[0, 1], [0, 1]])
            assert stats.chisquare(grid.ravel()).pvalue > 1e-4

    def test_single_bits_are_fair(self, which: str) -> None:
        bits = (_uniforms(which) * 2**32).astype(np.uint64)
        for bit in range(32):
            ones = int(((bits >> np.uint64(bit)) & np.uint64(1)).sum())
            assert stats.binomtest(ones, COUNT).pvalue > 1e-5


def test_streams_are_independent() -> None:
    """The same counter gives independent numbers in two streams."""
    columns = [[uniform(3, stream, i, 0) for i in range(COUNT)] for stream in Stream]
    for a in range(4):
        for b in range(a):
            assert stats.spearmanr(columns[a], columns[b]).pvalue > 1e-4


def test_the_scalar_and_the_vector_version_agree() -> None:
    tokens = np.array([0, 1, 63, 8191, 128_255, 2**31 - 1], np.int64)
    for seed in (0, 1, 2**63 - 1):
        for stream in Stream:
            for position in (0, 1, 131_071):
                units = np.array([uniform(seed, stream, position, int(token)) for token in tokens])
                np.testing.assert_array_equal(gumbel(seed, stream, position, tokens), -np.log(-np.log(units)))


def test_extreme_hashes_stay_between_zero_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 0 or 1 would give infinite Gumbel noise, so that a token always or never wins."""
    monkeypatch.setattr(noise, "key", lambda *_: 0)  # It remembers results.
    for word in (0, 1, (1 << 64) - 1, (1 << 64) - 2):
        monkeypatch.setattr(noise, "_mix", lambda _, word=word: word)
        assert 0.0 < uniform(0, Stream.TOKEN, 0) < 1.0


def test_the_noise_of_a_token_does_not_depend_on_other_tokens() -> None:
    whole = gumbel(9, Stream.TOKEN, 4, np.arange(1000))
    some = np.array([3, 500, 999])
    np.testing.assert_array_equal(gumbel(9, Stream.TOKEN, 4, some), whole[some])


def test_gumbel_max_is_sampling_from_the_softmax() -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, -3.0])
    tokens = np.arange(len(logits))
    counts = np.zeros(len(logits))
    for position in range(COUNT):
        counts[(logits + gumbel(11, Stream.TOKEN, position, tokens)).argmax()] += 1
    probs = np.exp(logits) / np.exp(logits).sum()
    assert stats.chisquare(counts, probs * COUNT).pvalue > 1e-4


def test_gumbel_order_is_sampling_without_replacement() -> None:
    probs = np.array([0.5, 0.3, 0.2])
    counts: dict[tuple[int, ...], int] = {}
    for position in range(COUNT):
        order = np.argsort(-(np.log(probs) + gumbel(2, Stream.DRAFT, position, np.arange(3))))
        pair = tuple(int(i) for i in order[:2])
        counts[pair] = counts.get(pair, 0) + 1
    law = {(i, j): probs[i] * probs[j] / (1 - probs[i]) for i in range(3) for j in range(3) if i != j}
    observed = [counts.get(pair, 0) for pair in law]
    assert stats.chisquare(observed, [p * COUNT for p in law.values()]).pvalue > 1e-4
