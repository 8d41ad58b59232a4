"""What a draft would say of a text: where it is right, and how sure it is of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trace", "flips", "stationary", "stretches"]


@dataclass(frozen=True, slots=True)
class Trace:
    """A text of so many tokens. right: bool [n], the draft's best guess for each is the target's token.
    sure: float64 [n], in [0, 1], the probability that the draft gives to it."""

    name: str
    right: NDArray[np.bool_]
    sure: NDArray[np.float64]


def stationary(rate: float, length: int, seed: int, *, informed: bool = True) -> Trace:
    """A draft that is right at one rate. informed: it is surer where it is right."""
    return stretches([rate], length, seed, informed=informed)


def flips(high: float, low: float, every: int, length: int, seed: int) -> Trace:
    """Rates that change after every so many tokens."""
    return stretches([(high, low)[at % 2] for at in range(-(-length // every))], length, seed)


def stretches(rates: Sequence[float], length: int, seed: int, *, informed: bool = True) -> Trace:
    """Stretches of equal length, each with a rate of its own.

    How sure it is, is drawn from a Beta law around the rate; where it is informed, right and wrong are then
    drawn with that very chance, as by a draft whose probabilities are true.
    """
    random = np.random.default_rng(seed)
    at = np.array([rates[i * len(rates) // length] for i in range(length)])
    weight = 2.0 if informed else 400.0
    sure = random.beta(weight * at + 1e-3, weight * (1.0 - at) + 1e-3)
    chance = sure if informed else at
    name = "/".join(f"{rate:g}" for rate in dict.fromkeys(rates))
    return Trace(name, random.random(length) < chance, sure)
