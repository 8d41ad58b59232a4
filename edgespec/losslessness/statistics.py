"""Goodness-of-fit tests for sampled tokens: the G-test with simulated p-values, and Holm's correction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.sampling import Distribution

__all__ = ["Sample", "holm", "p_value"]

# Counts of tokens sampled after the same prefix, and the distribution that they should follow.
Sample = tuple[Counter[int], Distribution]

# Number of simulated trials: in the first batch, in total at most, and in each further batch.
_FIRST_TRIALS, _MAX_TRIALS, _BATCH_TRIALS = 2_000, 100_000, 10_000
# Compute p-values below this with more simulated trials, so that they stay precise after Holm's correction.
_SUSPICIOUS_P_VALUE = 0.02


def p_value(samples: Iterable[Sample]) -> float | None:
    """Test whether all samples follow their expected distributions, and return the p-value.

    The test statistic is the sum of the samples' G statistics. Tokens with an expected count below 1 share
    one bin. The p-value is simulated, because the expected counts are too small for the chi-square
    approximation. Returns None if there is nothing to compare.
    """
    binned = [pair for sample in samples if len((pair := _binned(*sample))[0]) > 1]
    if not binned:
        return None
    observed = float(sum(_statistic(counts, probs) for counts, probs in binned))
    random = np.random.default_rng(0)
    beyond, trials = 0, 0
    while trials < _FIRST_TRIALS or (trials < _MAX_TRIALS and beyond < _SUSPICIOUS_P_VALUE * trials):
        size = _FIRST_TRIALS if trials == 0 else _BATCH_TRIALS
        simulated = np.zeros(size)
        for counts, probs in binned:
            simulated += _statistic(random.multinomial(int(counts.sum()), probs, size), probs)
        beyond += int((simulated >= observed - 1e-9).sum())
        trials += size
    return (beyond + 1) / (trials + 1)


def _binned(counts: Counter[int], expected: Distribution) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    total = counts.total()
    frequent = expected.probs * total >= 1
    tokens, probs = expected.tokens[frequent], expected.probs[frequent]
    numbers = [counts[int(token)] for token in tokens]
    rest_prob, rest_count = max(0.0, 1.0 - float(probs.sum())), total - sum(numbers)
    if rest_prob * total > 1e-9 or rest_count:
        numbers, probs = [*numbers, rest_count], np.append(probs, rest_prob)
    return np.array(numbers, np.int64), probs / probs.sum()


def _statistic(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> NDArray[np.float64]:
    expected = counts.sum(axis=-1, keepdims=True) * probs
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / expected), 0.0)
    statistic: NDArray[np.float64] = 2 * terms.sum(axis=-1)
    return statistic


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple testing (Holm 1979), in the given order."""
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
