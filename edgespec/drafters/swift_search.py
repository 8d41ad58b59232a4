"""A search for the layers to skip: at random, with a step of Bayesian optimisation now and then.

Source: SWIFT (arXiv 2410.06916), section 4.1. A Gaussian process over the sets tried so far predicts how well
others agree; the next one is where most improvement is expected (Jones et al. 1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.draft_length import best_draft_length

__all__ = ["Found", "Layers", "SwiftSearch", "speed_up"]

Layers: TypeAlias = tuple[int, ...]

# The paper skips about this share of the layers, and takes every 25th step by its model.
SKIP_RATIO = 0.45
BAYESIAN_EVERY = 25
_LONGEST_DRAFT = 8
# Sets that are remembered, and the counts after which older evidence fades.
_MOST_SETS = 256
_MOST_JUDGED = 2048
_POOL = 256


@dataclass(frozen=True, slots=True)
class Found:
    """A set of layers to skip. draft_length: the one that the expected speed-up needs."""

    layers: Layers
    agreement: float
    speed_up: float
    draft_length: int


def speed_up(agreement: float, cost: float, pass_cost: Callable[[int], float]) -> tuple[float, int]:
    """(tokens per plain step's time, best draft length) of a draft that costs `cost` plain steps a token."""
    length, speed = best_draft_length(agreement, lambda k: k * cost + pass_cost(k + 1), _LONGEST_DRAFT)
    return speed, length


class SwiftSearch:
    """Sets of layers and how often drafting without them was right. The first and the last layer stay.

    tried: how many sets were counted, those forgotten included.
    """

    def __init__(self, layer_count: int, pass_cost: Callable[[int], float], seed: int) -> None:
        self.tried = 0
        self._layer_count = layer_count
        self._pass_cost = pass_cost
        self._random = np.random.default_rng(seed)
        # How many drafted tokens were right, of how many.
        self._counts: dict[Layers, tuple[int, int]] = {}
        # What those counts say of each set; weighed anew only when its counts change.
        self._found: dict[Layers, Found] = {}

    @property
    def best(self) -> Found | None:
        """The set of the largest expected speed-up; None before anything was tried."""
        return max(self._found.values(), key=lambda found: found.speed_up, default=None)

    def _set(self, layers: Layers, right: int, judged: int) -> None:
        """These are the counts of a set now. One wrong token is added: few observations promise less."""
        self._counts[layers] = (right, judged)
        agreement = right / (judged + 1)
        speed, length = speed_up(agreement, 1.0 - len(layers) / self._layer_count, self._pass_cost)
        self._found[layers] = Found(layers, agreement, speed, length)

    def count(self, layers: Layers, right: int, judged: int) -> None:
        """So many of the tokens that were drafted without these layers were right."""
        if judged == 0:
            return
        if layers not in self._counts:
            self.tried += 1
        before = self._counts.get(layers, (0, 0))
        if before[1] > _MOST_JUDGED:
            before = (before[0] // 2, before[1] // 2)
        self._set(layers, before[0] + right, before[1] + judged)
        if len(self._counts) > _MOST_SETS:
            worst = min(self._found.values(), key=lambda found: found.speed_up).layers
            del self._counts[worst], self._found[worst]

    def next(self) -> Layers:
        """The set to try next."""
        if self.tried % BAYESIAN_EVERY == BAYESIAN_EVERY - 1:
            return self._most_promising()
        return self._drawn()

    def _drawn(self) -> Layers:
        """A set at random, of about the wanted size."""
        free = self._layer_count - 2
        count = round(SKIP_RATIO * self._layer_count + self._random.uniform(-1.0, 1.0))
        chosen = self._random.permutation(free)[: max(1, min(count, free))]
        return tuple(sorted((chosen + 1).tolist()))

    def _neighbour(self, layers: Layers) -> Layers:
        """The same with one layer exchanged."""
        others = [layer for layer in range(1, self._layer_count - 1) if layer not in layers]
        if not others:
            return layers
        kept = list(layers)
        kept[int(self._random.integers(len(kept)))] = others[int(self._random.integers(len(others)))]
        return tuple(sorted(kept))

    def _most_promising(self) -> Layers:
        """Of sets drawn and near the best, the one of most expected improvement of the speed-up."""
        known = list(self._counts)
        leaders = sorted(known, key=lambda one: -self._found[one].speed_up)[:8]
        pool = {self._drawn() for _ in range(_POOL)}
        pool |= {self._neighbour(leaders[i % len(leaders)]) for i in range(_POOL)}
        wanted = sorted(pool - set(known))
        if not wanted:
            return self._drawn()
        values = np.array([self._found[one].speed_up for one in known])
        judged = np.array([self._counts[one][1] for one in known])
        mean, deviation = _predicted(self._bits(known), values, judged, self._bits(wanted))
        gain = _expected_improvement(mean, deviation, float(values.max()))
        return wanted[int(gain.argmax())]

    def _bits(self, sets: list[Layers]) -> NDArray[np.float64]:
        """[sets, layers]: 1 where a layer is skipped."""
        bits = np.zeros((len(sets), self._layer_count))
        for row, layers in zip(bits, sets, strict=True):
            row[list(layers)] = 1.0
        return bits

    def to_keep(self) -> dict[str, NDArray[Any]]:
        """All that is known, to be taken over by another search."""
        return {
            "sets": self._bits(list(self._counts)).astype(np.uint8),
            "counts": np.array(list(self._counts.values()), np.int64).reshape(-1, 2),
            "tried": np.array(self.tried, np.int64),
        }

    def take_over(self, kept: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `to_keep` gave; what does not fit this model is left out."""
        if not {"sets", "counts", "tried"} <= set(kept):
            return
        sets, counts = kept["sets"], kept["counts"]
        if sets.shape != (len(counts), self._layer_count) or counts.shape != (len(sets), 2):
            return
        if kept["tried"].shape != ():
            return
        for row, (right, judged) in zip(sets, counts.tolist(), strict=True):
            layers = tuple(np.flatnonzero(row).tolist())
            inner = bool(layers) and layers[0] > 0 and layers[-1] < self._layer_count - 1
            if inner and 0 <= right <= judged and judged > 0:
                self._set(layers, right, judged)
        self.tried = max(len(self._counts), int(kept["tried"]))


def _predicted(
    known: NDArray[np.float64],
    values: NDArray[np.float64],
    judged: NDArray[np.int64],
    wanted: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of a Gaussian process at `wanted` [n, layers] after `values` at `known`.

    Sets are near when few layers differ. What was judged on fewer tokens is noisier.
    """
    centre, spread = float(values.mean()), max(float(values.std()), 1e-6)
    near = max(2.0, SKIP_RATIO * known.shape[1])

    def kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        differing: NDArray[np.float64] = a.sum(1)[:, None] + b.sum(1)[None] - 2.0 * a @ b.T
        values: NDArray[np.float64] = np.exp(-differing / near)
        return values

    own = kernel(known, known) + np.diag(1e-6 + 4.0 / np.maximum(judged, 1))
    cross = kernel(wanted, known)
    mean = centre + spread * (cross @ np.linalg.solve(own, (values - centre) / spread))
    variance = 1.0 - np.einsum("ij,ji->i", cross, np.linalg.solve(own, cross.T))
    return mean, spread * np.sqrt(np.maximum(variance, 1e-12))


def _expected_improvement(
    mean: NDArray[np.float64], deviation: NDArray[np.float64], best: float
) -> NDArray[np.float64]:
    """How much more than `best` is to be expected."""
    z = (mean - best) / deviation
    below = np.array([0.5 * (1.0 + math.erf(one / math.sqrt(2.0))) for one in z])
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    gain: NDArray[np.float64] = (mean - best) * below + deviation * density
    return gain
