"""A sparse probability distribution over the tokens that pass the sampling filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Distribution"]


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of a set of tokens. Every other token has probability zero.

    Attributes:
        tokens: Token ids, int64 [n], strictly ascending, so that `argmax` prefers the lowest id on ties.
        probs: Probabilities, float64 [n], non-negative, summing to one.
    """

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]

    @classmethod
    def normalised(cls, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> Distribution:
        return cls(tokens, weights / weights.sum())

    @classmethod
    def point_mass(cls, token: int) -> Distribution:
        """Return a distribution in which one token has probability 1."""
        return cls(np.array([token], np.int64), np.array([1]))

    def __len__(self) -> int:
        return len(self.tokens)

    def prob(self, token: int) -> float:
        """Return the probability of a token, or 0 if the distribution does not contain it."""
        i = int(np.searchsorted(self.tokens, token))
        if i == len(self.tokens) or self.tokens[i] != token:
            return 0
        prob: float = self.probs[i]
        return prob

    def probs_of(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probabilities of `tokens` (int64 [m]) as float64 [m]."""
        i = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        return np.where(self.tokens[i] == tokens, self.probs[i], 0)

    def residual(self, other: Distribution, scale: float = 1) -> NDArray[np.float64]:
        """Return the unnormalised max(scale * self - other, 0) for each token as float64 [n].

        This is the residual of rejection sampling (Leviathan et al. 2023, section 2.3).
        """
        return np.maximum(scale * self.probs - other.probs_of(self.tokens), 0)

    def without(self, token: int) -> Distribution | None:
        """Return this distribution without one token, or None if no other token is possible."""
        keep = self.tokens != token
        weights = self.probs[keep]
        if weights.sum() <= 0:
            return None
        return Distribution.normalised(self.tokens[keep], weights)

    def sample(self, uniform: float) -> int:
        """Return the token at the quantile `uniform`, a random number in [0, 1)."""
        cumulative = np.cumsum(self.probs)
        last = np.searchsorted(cumulative, cumulative[-1], side="left")
        i = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return int(self.tokens[min(i, last)])
