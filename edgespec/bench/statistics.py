"""Statistics of speed ratios: geometric means, confidence intervals, and the best method per prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Ratios", "geometric_mean", "interval", "oracle", "typical", "worst"]

# Speed-ups over plain decoding: one sequence per prompt, with one value per repeat.
Ratios = Sequence[Sequence[float]]

_DRAWS = 2000
_LEVEL = 0.95


def typical(ratios: Sequence[float]) -> float:
    """Return the median. For an even number of values, this is the geometric mean of the middle two."""
    return float(np.exp(np.median(np.log(ratios))))


def geometric_mean(ratios: Ratios) -> float:
    """Return the geometric mean, over all prompts, of each prompt's median speed-up."""
    return float(np.exp(np.mean(np.log([typical(each) for each in ratios]))))


def worst(ratios: Ratios) -> float:
    """Return the lowest of all prompts' median speed-ups."""
    return min(typical(each) for each in ratios)


def interval(ratios: Ratios, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the geometric mean, or None if there is only one reply.

    Uses a percentile bootstrap (Efron 1979) over prompts and repeats. With few prompts, the interval is too
    narrow.

    Args:
        ratios: Speed-ups over plain decoding by prompt and repeat.
        seed: Random seed for the bootstrap, fixed so that reports are reproducible.
    """
    if sum(len(each) for each in ratios) < 2:
        return None
    random = np.random.default_rng(seed)
    logs = [np.log(each) for each in ratios]
    drawn = [each[random.integers(0, len(each), (_DRAWS, len(each)))] for each in logs]
    medians = np.stack([np.median(each, axis=1) for each in drawn], axis=1)
    picks = random.integers(0, len(logs), medians.shape)
    means = np.take_along_axis(medians, picks, axis=1).mean(axis=1)
    low, high = np.exp(np.quantile(means, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2)))
    return float(low), float(high)


def oracle(fixed: Sequence[Ratios]) -> float:
    """Return the geometric mean speed-up if each prompt were answered with its best fixed method.

    This is an upper bound, because the best method is chosen in hindsight.

    Args:
        fixed: The speed-ups of each fixed method, for the same prompts in the same order.
    """
    best = [max(typical(each) for each in prompt) for prompt in zip(*fixed, strict=True)]
    return float(np.exp(np.mean(np.log(best))))
