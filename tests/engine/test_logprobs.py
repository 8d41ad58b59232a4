"""Log-probabilities of tokens: values, ties and the number of alternatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_softmax

from edgespec.engine.logits import HostLogits, token_logprob

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
