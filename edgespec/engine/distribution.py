"""A probability distribution over the few tokens that survive the filters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Distribution"]


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of a set of tokens; every other token has probability zero.

    `tokens`: int64 [n], strictly ascending, so that `argmax` breaks ties towards the lowest id.
    `probs`: float64 [n], not negative, summing to one.
    """

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]

    @classmethod
    def normalised(cls, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> Distribution:
        """The distribution proportional to `weights` (their sum must be positive)."""
        return cls(tokens, weights / weights.sum())

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """All mass on one token. The one is a whole number: exact whatever it is reckoned with."""
        return cls(np.array([token], np.int64), np.array([1]))

    def __len__(self) -> int:
        return len(self.tokens)

    def prob(self, token: int) -> float:
        """The probability of one token, 0.0 outside the set."""
        i = int(np.searchsorted(self.tokens, token))
        if i == len(self.tokens) or self.tokens[i] != token:
            return 0
        prob: float = self.probs[i]
        return prob

    def on(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probabilities of `tokens` (int64 [m]), float64 [m]."""
        i = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        return np.where(self.tokens[i] == tokens, self.probs[i], 0)

    def minus(self, other: Distribution, scale: float = 1) -> NDArray[np.float64]:
        """max(scale * self - other, 0) on this distribution's own tokens: float64 [n], not normalised.

        This is the residual of rejection sampling (Leviathan et al. 2023, section 2.3); tokens only
        `other` knows have no mass in it.
        """
        return np.maximum(scale * self.probs - other.on(self.tokens), 0)

    def without(self, tokens: Iterable[int]) -> Distribution | None:
        """This distribution given that none of `tokens` came out; None when nothing is left."""
        keep = ~np.isin(self.tokens, np.fromiter(tokens, np.int64))
        weights = self.probs[keep]
        if weights.sum() <= 0:
            return None
        return Distribution.normalised(self.tokens[keep], weights)

    def pick(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        cumulative = np.cumsum(self.probs)
        # Rounding may reach the very end: never beyond the last token that has any mass.
        last = np.searchsorted(cumulative, cumulative[-1], side="left")
        i = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return int(self.tokens[min(i, last)])
