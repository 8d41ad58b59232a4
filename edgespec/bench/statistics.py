"""Ratios, how sure they are, and what hindsight would have chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Ratios", "geometric_mean", "interval", "oracle", "typical", "worst"]

# Of each prompt, the paired ratios of its repeats: all positive, at least one.
Ratios = Sequence[Sequence[float]]

_DRAWS = 2000
_LEVEL = 0.95


def typical(ratios: Sequence[float]) -> float:
    """The median of repeats, halfway in proportion between the middle two."""
    return float(np.exp(np.median(np.log(ratios))))


def geometric_mean(ratios: Ratios) -> float:
    """Of what is typical for each prompt."""
    return float(np.exp(np.mean(np.log([typical(each) for each in ratios]))))


def worst(ratios: Ratios) -> float:
    """Of what is typical for each prompt, the least."""
    return min(typical(each) for each in ratios)


def interval(ratios: Ratios, seed: int = 0) -> tuple[float, float] | None:
    """Where the geometric mean lies with 95 % confidence; None where there is one reply only.

    A percentile bootstrap (Efron 1979) over the prompts and, for each, over its repeats: other prompts of
    the same kind, and other moments, could have been drawn. With few prompts it is too narrow.
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
    """The geometric mean if, of the same prompts answered in several ways, each were answered in its best.

    It is hindsight: of ways that are equally good it takes the luckier, and is a little too good to reach.
    """
    best = [max(typical(each) for each in prompt) for prompt in zip(*fixed, strict=True)]
    return float(np.exp(np.mean(np.log(best))))
