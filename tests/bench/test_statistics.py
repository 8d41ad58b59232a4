"""The statistics, by hand and by what must hold of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.figures import geometric_mean, interval, oracle, typical, worst

ratio = st.floats(0.1, 10.0)
repeats = st.lists(ratio, min_size=1, max_size=4)


def test_by_hand() -> None:
    assert typical([1.0, 4.0]) == pytest.approx(2.0)
    assert typical([0.5, 8.0, 2.0]) == pytest.approx(2.0)
    ratios = [[1.0, 4.0], [8.0], [0.25, 0.5, 9.0]]  # typically 2, 8 and 0.5
    assert geometric_mean(ratios) == pytest.approx(2.0)
    assert worst(ratios) == pytest.approx(0.5)
    # The best of each prompt: 2, 8 and 2.
    assert oracle([ratios, [[1.0], [1.0], [2.0]]]) == pytest.approx(32 ** (1 / 3))


@given(ratio, st.integers(1, 5), st.integers(1, 3))
def test_what_is_always_so_much_faster_is_so_much_faster(factor: float, prompts: int, times: int) -> None:
    ratios = [[factor] * times] * prompts
    assert geometric_mean(ratios) == pytest.approx(factor)
    assert worst(ratios) == pytest.approx(factor)
    found = interval(ratios)
    assert found is None if prompts * times == 1 else found == pytest.approx((factor, factor))


@given(st.lists(repeats, min_size=2, max_size=6), st.integers(0, 5))
def test_an_interval_lies_between_the_least_and_the_most(ratios: list[list[float]], seed: int) -> None:
    found = interval(ratios, seed)
    assert found is not None
    low, high = found
    everything = [each for prompt in ratios for each in prompt]
    assert min(everything) * (1 - 1e-9) <= low <= high <= max(everything) * (1 + 1e-9)
    assert interval(ratios, seed) == found


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(repeats, min_size=n, max_size=n), min_size=1)))
def test_hindsight_is_never_beaten(fixed: list[list[list[float]]]) -> None:
    assert oracle(fixed) >= max(geometric_mean(ratios) for ratios in fixed) * (1 - 1e-9)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        ratios = np.exp(random.normal(np.log(1.3), 0.2, (24, 2))).tolist()
        low, high = interval(ratios, trial) or (0.0, 0.0)
        covered += low <= 1.3 <= high
    assert 180 <= covered <= 199


def test_more_prompts_make_it_narrower() -> None:
    random = np.random.default_rng(2)
    widths = []
    for count in (6, 96):
        low, high = interval(np.exp(random.normal(0.0, 0.3, (count, 1))).tolist()) or (0.0, 0.0)
        widths.append(high / low)
    assert widths[1] ** 2 < widths[0]
