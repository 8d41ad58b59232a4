"""Estimate memory growth over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

# Growth in MiB per hour below which memory counts as flat. Allocators never return all memory.
_NEGLIGIBLE = 4.0


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth in MiB per hour, and the half width of its 95 % interval."""

    slope: float
    error: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth is negligible, or not significantly greater than zero."""
        return self.slope - self.error <= 0 or self.slope <= _NEGLIGIBLE

    def __str__(self) -> str:
        if self.error == inf:
            return "too few samples to tell"
        verdict = "flat" if self.is_flat else "it grows"
        return f"{self.slope:+.2f} ± {self.error:.2f} MiB per hour: {verdict}"


def fit(segments: Sequence[Sequence[tuple[float, float]]]) -> Trend:
    """Fit one growth rate to the samples of all processes.

    Args:
        segments: For each process, samples of (seconds, bytes). Each process has its own intercept.
    """
    hours, mebibytes, levels = [], [], 0
    for segment in segments:
        if len(segment) > 2:
            samples = np.array(segment, float)
            hours.append(samples[:, 0] / 3600 - samples[:, 0].mean() / 3600)
            mebibytes.append(samples[:, 1] / 2**20 - samples[:, 1].mean() / 2**20)
            levels += 1
    if not levels:
        return Trend(0.0, inf)
    x, y = np.concatenate(hours), np.concatenate(mebibytes)
    spread = float((x**2).sum())
    slope = float((x * y).sum()) / spread
    freedom = max(1, len(x) - levels - 1)
    return Trend(slope, 1.96 * sqrt(float(((y - slope * x) ** 2).sum()) / freedom / spread))
