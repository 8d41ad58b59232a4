"""Apply a reply's sampling chain to logits, and draw tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits, candidates
from edgespec.engine.noise import Noise, Stream, gumbel
from edgespec.engine.processors import Candidates, LogitsProcessor, apply_chain, build_processors
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import BackendError

__all__ = ["Sampler"]


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
        """Return tokens that almost certainly come next because of a constraint, at most `limit`."""
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
                f"the model returned non-finite logits at position {self.position}",
                "try --kv-type f16, or download the model again in case its file is damaged",
                code="logits_not_finite",
            )

    def _nothing_left(self) -> BackendError:
        return BackendError(
            f"logit_bias or a constraint forbids every token at position {self.position}",
            "allow at least one token",
            code="every_token_forbidden",
        )
