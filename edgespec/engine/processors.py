"""The sampling chain: penalties, bias, temperature and filters as logits processors.

To add a processor, write a class and add it to `build_processors`. It works with every backend, because the
sampler runs `LogitsProcessor.apply` on the host unless a backend implements the whole chain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import BackendError

__all__ = [
    "Candidates",
    "LogitBias",
    "LogitsProcessor",
    "MinP",
    "MinTokens",
    "Penalties",
    "Temperature",
    "TopK",
    "TopP",
    "TypicalP",
    "apply_chain",
    "build_processors",
    "max_logit",
]

# Token ids (int64 [n], ascending) and their logits (float64 [n]).
Candidates: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

_NO_TOKENS = np.zeros(0, np.int64)


class LogitsProcessor(ABC):
    """One step of the sampling chain: a penalty, a bias, a mask or a filter.

    The sampler calls `push` for each token that it appends to the sequence and `pop` to remove tokens, so
    that `apply` always knows which tokens precede the one to sample.

    Invariants:

    - `apply` depends only on the constructor's arguments and the pushed tokens.
    - `pop(n)` restores exactly the state before the last n calls to `push`.
    - `apply` keeps token ids in ascending order.
    """

    @abstractmethod
    def apply(self, candidates: Candidates) -> Candidates:
        """Remove candidate tokens or change their logits. A logit of -inf forbids a token."""

    def push(self, token: int) -> None:  # noqa: B027
        """Append a token to the token history."""

    def pop(self, count: int) -> None:  # noqa: B027
        """Remove the last `count` tokens from the token history."""

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return the ids of all tokens whose logits `apply` can change, or None if it needs all logits.

        The sampler saves time by processing only these tokens and the most likely ones.
        """
        return None

    def forced_tokens(self, limit: int) -> list[int]:  # noqa: ARG002
        """Return up to `limit` tokens that almost certainly come next, for drafting.

        For example, a JSON schema can determine the name of the next property.
        """
        return []

    def max_candidates(self) -> int | None:
        """Return N if `apply` keeps only candidates among the N largest logits, else None."""
        return None

    def max_margin(self) -> float | None:
        """Return m if `apply` discards every logit that is more than m below the largest, else None."""
        return None


class Penalties(LogitsProcessor):
    """Repetition, presence and frequency penalties for tokens of the prompt and the reply.

    Only the last `window` tokens are penalised, or all tokens if `window` is negative. The repetition penalty
    divides positive logits, as in CTRL (Keskar et al. 2019, arXiv 1909.05858), and multiplies negative ones.
    """

    def __init__(
        self, history: Iterable[int], repetition: float, presence: float, frequency: float, window: int
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._window = window if window >= 0 else 1 << 60
        self._path = list(history)
        self._counts = Counter(self._path[-self._window :])

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        penalised = self.touched_tokens(1 << 62)
        at = _places(tokens, penalised)
        counts = np.array([self._counts[token] for token in tokens[at].tolist()], np.float64)
        values = logits[at]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        logits = logits.copy()
        logits[at] = values - counts * self._frequency - self._presence
        return tokens, logits

    def push(self, token: int) -> None:
        self._path.append(token)
        self._counts[token] += 1
        if len(self._path) > self._window:
            self._uncount(self._path[-self._window - 1])

    def pop(self, count: int) -> None:
        for _ in range(count):
            self._uncount(self._path.pop())
            if len(self._path) >= self._window:
                self._counts[self._path[-self._window]] += 1

    def _uncount(self, token: int) -> None:
        self._counts[token] -= 1
        if not self._counts[token]:
            del self._counts[token]

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        tokens = np.sort(np.fromiter(self._counts, np.int64, len(self._counts)))
        return tokens[tokens < vocab_size]


class LogitBias(LogitsProcessor):
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens = np.array(sorted(bias), np.int64)
        self._bias = np.array([bias[token] for token in sorted(bias)], np.float64)

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        at = _places(tokens, self._tokens)
        logits = logits.copy()
        logits[at] += self._bias[_places(self._tokens, tokens[at])]
        return tokens, logits

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        return self._tokens[self._tokens < vocab_size]


class MinTokens(LogitsProcessor):
    """Forbids tokens that end the reply until the reply reaches a minimum length.

    If a constraint allows no other token, the reply may end earlier.
    """

    def __init__(self, end_tokens: Iterable[int], minimum: int) -> None:
        self._ends = np.array(sorted(end_tokens), np.int64)
        self._minimum = minimum
        self._count = 0

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        kept = ~np.isin(tokens, self._ends, assume_unique=True)
        if self._count >= self._minimum or not kept.any():
            return candidates
        return tokens[kept], logits[kept]

    def push(self, token: int) -> None:  # noqa: ARG002
        self._count += 1

    def pop(self, count: int) -> None:
        self._count -= count

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        return self._ends[self._ends < vocab_size] if self._count < self._minimum else _NO_TOKENS


@dataclass(frozen=True, slots=True)
class Temperature(LogitsProcessor):
    """Divides logits by a temperature above 0."""

    temperature: float

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        peak = max_logit(logits)
        if peak == -np.inf:
            return tokens[:0], logits[:0]
        with np.errstate(over="ignore"):
            return tokens, (logits - peak) / self.temperature

    def touched_tokens(self, vocab_size: int) -> NDArray[np.int64]:  # noqa: ARG002
        return _NO_TOKENS


@dataclass(frozen=True, slots=True)
class TopK(LogitsProcessor):
    """Keeps the k most likely tokens. Among equally likely tokens, those with the lowest ids are kept."""

    k: int

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, log_probs = candidates
        if self.k >= len(tokens):
            return candidates
        threshold = np.partition(log_probs, -self.k)[-self.k]
        above, ties = log_probs > threshold, np.flatnonzero(log_probs == threshold)
        above[ties[: self.k - np.count_nonzero(above)]] = True
        return tokens[above], log_probs[above]

    def max_candidates(self) -> int:
        return self.k


@dataclass(frozen=True, slots=True)
class TypicalP(LogitsProcessor):
    """Locally typical sampling (Meister et al. 2023, arXiv 2202.00666).

    Keeps the tokens whose surprisal is closest to the entropy, up to a given probability mass, but at least
    one token.
    """

    mass: float

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, log_probs = candidates
        probs = _softmax(log_probs)
        surprise = -np.log(np.maximum(probs, 1e-300))
        distance = np.abs(surprise - (probs * surprise).sum())
        keep = _lowest_rank_with_mass(distance, probs, self.mass, guesses=(1.0, 4.0))
        return tokens[keep], log_probs[keep]


@dataclass(frozen=True, slots=True)
class TopP(LogitsProcessor):
    """Nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).

    Keeps the most likely tokens, up to a given probability mass, but at least one token.
    """

    mass: float

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, log_probs = candidates
        probs = _softmax(log_probs)
        keep = _lowest_rank_with_mass(-probs, probs, self.mass, guesses=(-1e-3, -1e-5))
        return tokens[keep], log_probs[keep]


@dataclass(frozen=True, slots=True)
class MinP(LogitsProcessor):
    """Discards tokens whose probability is below `share` times the highest one (arXiv 2407.01082)."""

    share: float

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, log_probs = candidates
        keep = log_probs >= log_probs.max() + math.log(self.share)
        return tokens[keep], log_probs[keep]

    def max_margin(self) -> float:
        return -math.log(self.share)


def build_processors(
    params: SamplingParams, history: Sequence[int], extra: Sequence[LogitsProcessor] = ()
) -> tuple[LogitsProcessor, ...]:
    """Build the sampling chain for a reply, in order of application.

    At temperature 0, filters such as top-p are omitted, because they never remove the most likely token.

    Args:
        params: The sampling settings.
        history: The tokens of the prompt.
        extra: Processors that come first and receive the model's unmodified logits, such as constraints.
    """
    chain = list(extra)
    if params.has_penalties:
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        chain.append(Penalties(history, *penalties, params.penalty_window))
    if params.logit_bias:
        chain.append(LogitBias(params.logit_bias))
    if params.temperature > 0:
        chain.append(Temperature(params.temperature))
        if params.top_k > 0:
            chain.append(TopK(params.top_k))
        if params.typical_p < 1:
            chain.append(TypicalP(params.typical_p))
        if params.top_p < 1:
            chain.append(TopP(params.top_p))
        if params.min_p > 0:
            chain.append(MinP(params.min_p))
    return tuple(chain)


def apply_chain(processors: Sequence[LogitsProcessor], candidates: Candidates) -> Candidates:
    """Apply the logits processors in order, and return the remaining tokens with their new logits."""
    for processor in processors:
        if not len(candidates[0]):
            break
        candidates = processor.apply(candidates)
    return candidates


def max_logit(logits: NDArray[np.float64]) -> float:
    """Return the largest logit, or -inf if the array is empty.

    Raises:
        BackendError: A custom processor returned NaN or +inf.
    """
    peak = float(logits.max(initial=-np.inf))
    if not peak < np.inf:
        what = f"a logits processor returned a logit of {peak}"
        raise BackendError(
            what,
            "make the logits processor return finite logits, or -inf to forbid a token",
            code="logits_not_finite",
        )
    return peak


def _places(tokens: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.intp]:
    at = np.searchsorted(tokens, wanted)
    at = at[at < len(tokens)]
    found: NDArray[np.intp] = at[tokens[at] == wanted[: len(at)]]
    return found


def _softmax(log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(log_probs - log_probs.max())
    probs: NDArray[np.float64] = weights / weights.sum()
    return probs


def _lowest_rank_with_mass(
    rank: NDArray[np.float64], probs: NDArray[np.float64], mass: float, guesses: tuple[float, ...]
) -> NDArray[np.intp]:
    for guess in (*guesses, np.inf):
        near = np.flatnonzero(rank <= guess)
        if guess == np.inf or probs[near].sum() > mass:
            break
    order = near[np.argsort(rank[near], kind="stable")]
    size = int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1
    return np.sort(order[:size])
