"""The statistical test of sampled replies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from edgespec.engine.sampling import Distribution
from edgespec.losslessness.report import holm, p_value


class TestStatistics:
    LAW = Distribution(np.arange(30), np.array([0.3, 0.2, 0.1] + [0.4 / 27] * 27))

    def draws(self, seed: int, count: int, law: Distribution) -> Counter[int]:
        return Counter(np.random.default_rng(seed).choice(law.tokens, count, p=law.probs).tolist())

    def test_p_values_are_uniform_under_the_null_hypothesis(self) -> None:
        values = [p_value([(self.draws(seed, 80, self.LAW), self.LAW)]) or 0.0 for seed in range(200)]
        assert stats.kstest(values, "uniform").pvalue > 1e-3

    def test_another_distribution_is_detected(self) -> None:
        other = Distribution(self.LAW.tokens, np.roll(self.LAW.probs, 1))
        p = p_value([(self.draws(1, 80, other), self.LAW)])
        assert p is not None
        assert p < 1e-4

    def test_impossible_tokens_are_detected(self) -> None:
        law = Distribution(np.arange(3), np.array([0.5, 0.5, 0.0]))
        p = p_value([(Counter({0: 50, 1: 49, 2: 1}), law)])
        assert p is not None
        assert p < 1e-4

    def test_a_single_bin_gives_no_p_value(self) -> None:
        certain = Distribution(np.array([7]), np.array([1.0]))
        assert p_value([(Counter({7: 100}), certain)]) is None
        assert p_value([]) is None

    def test_holm(self) -> None:
        assert holm([]) == []
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
        assert holm([0.5, 0.9]) == [1.0, 1.0]
