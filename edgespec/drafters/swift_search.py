"""Find the layers to skip in SWIFT (arXiv 2410.06916) by random search and occasional Bayesian steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.draft_length import best_draft_length

__all__ = ["LayerSet", "ScoredLayerSet", "SwiftSearch", "expected_speed_up"]

# Indices of the skipped layers in ascending order, starting at 0.
LayerSet: TypeAlias = tuple[int, ...]

# Fraction of layers to skip, and number of tried sets between Bayesian steps. Both are from the paper.
SKIP_RATIO = 0.45
BAYESIAN_INTERVAL = 25
# Maximum draft length to consider, and maximum number of layer sets to keep. Both are heuristics.
_MAX_DRAFT_LENGTH = 8
_MAX_SETS = 256
# When the counts of a set exceed this many tokens, they are halved, so that old observations lose weight.
_MAX_COUNTED_TOKENS = 2048
# Number of random sets to consider in a Bayesian step. It also considers as many variants of good sets.
_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class ScoredLayerSet:
    """A set of layers to skip and its expected speed-up.

    Attributes:
        layers: The skipped layers.
        agreement: Fraction of tokens that the target predicts identically when it skips these layers.
        speed_up: Expected speed-up over plain decoding; 1.0 means no speed-up.
        draft_length: Draft length that achieves this speed-up.
    """

    layers: LayerSet
    agreement: float
    speed_up: float
    draft_length: int


def expected_speed_up(agreement: float, cost: float, pass_cost: Callable[[int], float]) -> tuple[float, int]:
    """Return the highest expected speed-up over plain decoding, and the draft length that achieves it.

    Args:
        agreement: Probability that the target accepts a drafted token.
        cost: Cost of a drafted token, in target steps.
        pass_cost: v(m), the cost of a verify pass of m tokens in target steps.
    """
    length, speed_up = best_draft_length(agreement, lambda k: k * cost + pass_cost(k + 1), _MAX_DRAFT_LENGTH)
    return speed_up, length


class SwiftSearch:
    """Searches for the set of skipped layers with the highest expected speed-up.

    The first and the last layer are never skipped. A Gaussian process fitted to the sets tried so far
    predicts the speed-up of other sets. A Bayesian step tries the set with the highest expected improvement
    (Jones et al. 1998).

    Args:
        layer_count: Number of layers in the target.
        pass_cost: v(m), the cost of a verify pass of m tokens in target steps.
        seed: Random seed for generating sets.

    Attributes:
        tried: Number of sets tried so far, including those no longer stored.
    """

    def __init__(self, layer_count: int, pass_cost: Callable[[int], float], seed: int) -> None:
        self.tried = 0
        self._layer_count = layer_count
        self._pass_cost = pass_cost
        self._random = np.random.default_rng(seed)
        # Number of correct tokens and of all tokens drafted with each set.
        self._counts: dict[LayerSet, tuple[int, int]] = {}
        # Cached score of each set, which is recomputed when the set's counts change.
        self._scored: dict[LayerSet, ScoredLayerSet] = {}

    @property
    def best(self) -> ScoredLayerSet | None:
        """The set with the highest expected speed-up, or None if no set has been tried."""
        return max(self._scored.values(), key=lambda scored: scored.speed_up, default=None)

    def _set_counts(self, layers: LayerSet, right: int, total: int) -> None:
        self._counts[layers] = (right, total)
        # Count one extra wrong token, so that sets with few observations are not overrated.
        agreement = right / (total + 1)
        cost = 1.0 - len(layers) / self._layer_count
        speed_up, length = expected_speed_up(agreement, cost, self._pass_cost)
        self._scored[layers] = ScoredLayerSet(layers, agreement, speed_up, length)

    def record(self, layers: LayerSet, right: int, total: int) -> None:
        """Record that `right` of `total` tokens were correct when drafted without these layers."""
        if total == 0:
            return
        if layers not in self._counts:
            self.tried += 1
        old_right, old_total = self._counts.get(layers, (0, 0))
        if old_total > _MAX_COUNTED_TOKENS:
            old_right, old_total = old_right // 2, old_total // 2
        self._set_counts(layers, old_right + right, old_total + total)
        if len(self._counts) > _MAX_SETS:
            worst = min(self._scored.values(), key=lambda scored: scored.speed_up).layers
            del self._counts[worst], self._scored[worst]

    def next_set(self) -> LayerSet:
        """Return the set to try next."""
        if self.tried % BAYESIAN_INTERVAL == BAYESIAN_INTERVAL - 1:
            return self._bayesian_set()
        return self._random_set()

    def _random_set(self) -> LayerSet:
        skippable = self._layer_count - 2
        count = round(SKIP_RATIO * self._layer_count + self._random.uniform(-1.0, 1.0))
        chosen = self._random.permutation(skippable)[: max(1, min(count, skippable))]
        return tuple(sorted((chosen + 1).tolist()))

    def _neighbour(self, layers: LayerSet) -> LayerSet:
        """Return a copy of the set in which one random layer is replaced by another."""
        others = [layer for layer in range(1, self._layer_count - 1) if layer not in layers]
        if not others:
            return layers
        changed = list(layers)
        changed[int(self._random.integers(len(changed)))] = others[int(self._random.integers(len(others)))]
        return tuple(sorted(changed))

    def _bayesian_set(self) -> LayerSet:
        """Return the set that is expected to improve on the best one the most."""
        tried = list(self._counts)
        leaders = sorted(tried, key=lambda layers: -self._scored[layers].speed_up)[:8]
        pool = {self._random_set() for _ in range(_CANDIDATES)}
        pool |= {self._neighbour(leaders[i % len(leaders)]) for i in range(_CANDIDATES)}
        candidates = sorted(pool - set(tried))
        if not candidates:
            return self._random_set()
        values = np.array([self._scored[layers].speed_up for layers in tried])
        totals = np.array([self._counts[layers][1] for layers in tried])
        mean, deviation = _gaussian_process(self._bits(tried), values, totals, self._bits(candidates))
        improvement = _expected_improvement(mean, deviation, float(values.max()))
        return candidates[int(improvement.argmax())]

    def _bits(self, sets: list[LayerSet]) -> NDArray[np.float64]:
        """Return a float64 array [sets, layers] that contains 1 for each skipped layer, else 0."""
        bits = np.zeros((len(sets), self._layer_count))
        for row, layers in zip(bits, sets, strict=True):
            row[list(layers)] = 1.0
        return bits

    def saved_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the counts as named arrays to save for a later search."""
        return {
            "sets": self._bits(list(self._counts)).astype(np.uint8),
            "counts": np.array(list(self._counts.values()), np.int64).reshape(-1, 2),
            "tried": np.array(self.tried, np.int64),
        }

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the arrays returned by `saved_arrays`, ignoring entries that do not fit this model."""
        if not {"sets", "counts", "tried"} <= set(saved):
            return
        sets, counts = saved["sets"], saved["counts"]
        if sets.shape != (len(counts), self._layer_count) or counts.shape != (len(sets), 2):
            return
        if saved["tried"].shape != ():
            return
        for row, (right, total) in zip(sets, counts.tolist(), strict=True):
            layers = tuple(np.flatnonzero(row).tolist())
            skippable = bool(layers) and layers[0] > 0 and layers[-1] < self._layer_count - 1
            if skippable and 0 <= right <= total and total > 0:
                self._set_counts(layers, right, total)
        self.tried = max(len(self._counts), int(saved["tried"]))


def _gaussian_process(
    tried: NDArray[np.float64],
    values: NDArray[np.float64],
    totals: NDArray[np.int64],
    candidates: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Predict the speed-up of candidate sets with a Gaussian process.

    Sets that differ in few layers are assumed to have similar speed-ups. Values estimated from few tokens are
    treated as less certain.

    Args:
        tried: Observed sets [n, layers].
        values: Values of the observed sets [n].
        totals: Number of tokens from which each value was estimated [n].
        candidates: Sets to predict [m, layers].

    Returns:
        Mean and standard deviation of each candidate's predicted speed-up [m].
    """
    centre, spread = float(values.mean()), max(float(values.std()), 1e-6)
    length_scale = max(2.0, SKIP_RATIO * tried.shape[1])

    def kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        differing: NDArray[np.float64] = a.sum(1)[:, None] + b.sum(1)[None] - 2.0 * a @ b.T
        covariance: NDArray[np.float64] = np.exp(-differing / length_scale)
        return covariance

    own = kernel(tried, tried) + np.diag(1e-6 + 4.0 / np.maximum(totals, 1))
    cross = kernel(candidates, tried)
    mean = centre + spread * (cross @ np.linalg.solve(own, (values - centre) / spread))
    variance = 1.0 - np.einsum("ij,ji->i", cross, np.linalg.solve(own, cross.T))
    return mean, spread * np.sqrt(np.maximum(variance, 1e-12))


def _expected_improvement(
    mean: NDArray[np.float64], deviation: NDArray[np.float64], best: float
) -> NDArray[np.float64]:
    """Return by how much normally distributed values are expected to exceed `best`."""
    z = (mean - best) / deviation
    below = np.array([0.5 * (1.0 + math.erf(one / math.sqrt(2.0))) for one in z])
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    improvement: NDArray[np.float64] = (mean - best) * below + deviation * density
    return improvement
