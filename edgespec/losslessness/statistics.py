"""Do drawn tokens follow a law? The G-test with Monte-Carlo p-values, and Holm's correction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution

__all__ = ["Sample", "holm", "p_value"]

# Tokens drawn independently from one law (conditional on what came before), and that law.
Sample = tuple[Counter[int], Distribution]

_FIRST_TRIALS, _TRIALS, _BATCH = 2_000, 100_000, 10_000
# Below this first p-value the trials go on until it is known well enough to be corrected.
_SUSPICIOUS = 0.02


def p_value(samples: Iterable[Sample], seed: int = 0) -> float | None:
    """How likely counts at least this far from their laws are; None when every law leaves no choice.

    The G statistics of the samples are added up. Tokens expected less than once share a bin. The p-value
    is by simulation, because expected counts are far too small for the chi-square limit.
    """
    binned = [pair for pair in (_binned(counts, law) for counts, law in samples) if len(pair[0]) > 1]
    if not binned:
        return None
    observed = float(sum(_statistic(counts, probs) for counts, probs in binned))
    random = np.random.default_rng(seed)
    beyond, trials = 0, 0
    while trials < _FIRST_TRIALS or (trials < _TRIALS and beyond < _SUSPICIOUS * trials):
        size = _FIRST_TRIALS if trials == 0 else _BATCH
        simulated = np.zeros(size)
        for counts, probs in binned:
            drawn = random.multinomial(int(counts.sum()), probs, size)
            simulated += _statistic(drawn, probs)
        beyond += int((simulated >= observed - 1e-9).sum())
        trials += size
    return (beyond + 1) / (trials + 1)


def _binned(counts: Counter[int], law: Distribution) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and probabilities of the bins: tokens expected at least once, then all others together."""
    total = counts.total()
    own = law.probs * total >= 1
    kept, probs = law.tokens[own], law.probs[own]
    numbers = [counts[int(token)] for token in kept]
    rest_prob, rest_count = max(0.0, 1.0 - float(probs.sum())), total - sum(numbers)
    if rest_prob * total > 1e-9 or rest_count:
        numbers, probs = [*numbers, rest_count], np.append(probs, rest_prob)
    return np.array(numbers, np.int64), probs / probs.sum()


def _statistic(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """G = 2 sum O log(O / E) along the last axis; infinite where the impossible was counted."""
    expected = counts.sum(axis=-1, keepdims=True) * probs
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / expected), 0.0)
    statistic: NDArray[np.float64] = 2 * terms.sum(axis=-1)
    return statistic


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for being several (Holm 1979), in the order given."""
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
