"""Apply a reply's sampling chain to logits, and sample tokens from the resulting sparse distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits, candidates
from edgespec.engine.noise import Noise, Stream, gumbel
from edgespec.engine.processors import Candidates, LogitsProcessor, apply_chain, build_processors
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import BackendError

__all__ = ["Distribution", "Sampler"]


class Sampler:
    """Samples the tokens of one reply from logits.

    `push` appends a token to the sequence and `pop` removes tokens, for example to follow the paths of a
    draft tree. The random numbers depend only on the seed and the position.

    Args:
        params: The sampling settings.
        seed: The seed of the reply.
        history: The tokens of the prompt.
        processors: Additional logits processors, such as constraints.

    Attributes:
        position: Index of the next token, counted from the start of the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        history: Iterable[int],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        history = list(history)
        self.params = params
        self.seed = seed
        self.position = len(history)
        self._processors = build_processors(params, history, processors)

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0, so that the most likely token is always chosen."""
        return self.params.temperature == 0.0

    def push(self, token: int) -> None:
        self.position += 1
        for processor in self._processors:
            processor.push(token)

    def pop(self, count: int) -> None:
        self.position -= count
        for processor in self._processors:
            processor.pop(count)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that almost certainly come next because of a constraint."""
        return next((tokens for each in self._processors if (tokens := each.forced_tokens(limit))), [])

    def token(self, logits: Logits, row: int) -> int:
        """Sample a token from a row of logits. At temperature 0, return the most likely token."""
        tokens = self.ranked(logits, row, 1)
        if not tokens:
            raise self._nothing_left()
        return tokens[0]

    def ranked(self, logits: Logits, row: int, count: int) -> list[int]:
        """Return the `count` tokens with the highest scores, best first, for the branches of a draft tree.

        The list is empty if all tokens are forbidden, which can happen if a draft model lacks some tokens.
        """
        noise = None if self.greedy else Noise(self.seed, self.position)
        tokens, peak = logits.best(row, count, self._processors, noise)
        self._check(peak)
        return tokens

    def scores(self, logits: Logits, row: int) -> Candidates:
        """Return the tokens that the processors keep, and their log-probabilities plus Gumbel noise."""
        tokens, log_probs = self._survivors(logits, row)
        if not len(tokens):
            raise self._nothing_left()
        return tokens, log_probs + gumbel(self.seed, Stream.TOKEN, self.position, tokens)

    def distribution(self, logits: Logits, row: int) -> Distribution:
        """Return the probabilities of the tokens that remain after all logits processors."""
        if self.greedy:
            return Distribution.point_mass(self.token(logits, row))
        distribution = self.draft_distribution(logits, row)
        if distribution is None:
            raise self._nothing_left()
        return distribution

    def draft_distribution(self, logits: Logits, row: int) -> Distribution | None:
        """Return the probabilities of the remaining tokens, even at temperature 0, or None if none remain."""
        tokens, log_probs = self._survivors(logits, row)
        peak = log_probs.max(initial=-np.inf)
        return None if peak == -np.inf else Distribution.normalised(tokens, np.exp(log_probs - peak))

    def _survivors(self, logits: Logits, row: int) -> Candidates:
        found, peak = candidates(logits, row, self._processors)
        if math.isfinite(peak):
            found = apply_chain(self._processors, found)
        self._check(peak)
        return found

    def _check(self, peak: float) -> None:
        if not math.isfinite(peak):
            raise BackendError(
                f"the model computed invalid numbers (NaN or infinity) at position {self.position}",
                "try --kv-type f16; if that does not help, the model file may be damaged, so download it"
                " again",
                code="logits_not_finite",
            )

    def _nothing_left(self) -> BackendError:
        return BackendError(
            f"logit_bias or a constraint rules out every token at position {self.position}",
            "allow at least one token",
            code="every_token_forbidden",
        )


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
