"""From logits to a distribution to a token: the sampler chain of one reply.

Order of the chain: penalties and bias on the logits, temperature, top-k, typical, top-p, min-p,
renormalise. It works on candidate sets: what a filter is sure to discard is never computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits
from edgespec.engine.noise import Stream, gumbel
from edgespec.errors import BackendError, OptionError

__all__ = ["Sampler", "SamplingParams", "filtered"]

# Token ids, ascending, and one number for each: logits, or log-probabilities up to a constant.
Candidates: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

_RANGES = {
    "temperature": (0.0, 100.0, "0 is greedy, 0.8 is lively"),
    "top_k": (0, 1_000_000, "0 switches it off"),
    "top_p": (0.0, 1.0, "1 switches it off"),
    "min_p": (0.0, 1.0, "0 switches it off"),
    "typical_p": (0.0, 1.0, "1 switches it off"),
    "repetition_penalty": (0.01, 100.0, "1 switches it off"),
    "presence_penalty": (-100.0, 100.0, "0 switches it off"),
    "frequency_penalty": (-100.0, 100.0, "0 switches it off"),
    "penalty_window": (-1, 1_000_000, "-1 is the whole context"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings of the sampler chain.

    temperature: 0 is greedy (largest logit, lowest id on ties).
    top_k, top_p, min_p, typical_p: filters; 0, 1, 0 and 1 switch them off.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the window.
    presence_penalty, frequency_penalty: taken from the logit once, and once for each occurrence.
    penalty_window: how many of the last tokens (prompt included) the penalties see; -1 is all.
    logit_bias: added to the logits of these token ids; -inf forbids a token.

    Raises OptionError for a value outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high, hint) in _RANGES.items():
            value = getattr(self, name)
            kind = int if isinstance(low, int) else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                span = (
                    f"a whole number from {low} to {high}"
                    if kind is int
                    else f"a number from {low:g} to {high:g}"
                )
                raise OptionError(f"{name} is {value!r}", f"give {span} ({hint})")
        biases: Any = self.logit_bias
        if not isinstance(biases, Mapping):
            raise OptionError(f"logit_bias is {biases!r}", "give a mapping of token ids to numbers")
        for token, bias in biases.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise OptionError(f"logit_bias names the token {token!r}", "give token ids from 0 up")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not bias < math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias!r}", "give a finite number or -inf")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(f.name for f in fields(cls))

    @property
    def penalises(self) -> bool:
        """True when a penalty depends on the tokens before."""
        return self.penalty_window != 0 and (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


class Sampler:
    """The sampler chain of one reply, at one position of one path.

    It holds the tokens so far because penalties depend on them: `push` steps down a path of the
    draft, `pop` steps back. Noise depends on the seed and the absolute position alone.
    """

    def __init__(self, params: SamplingParams, seed: int, history: Iterable[int]) -> None:
        self.params = params
        self.seed = seed
        self._history = list(history)
        self._counts: Counter[int] = Counter()
        self._window = params.penalty_window if params.penalty_window >= 0 else 1 << 60
        self._biased = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[t] for t in sorted(params.logit_bias)], np.float64)
        if params.penalises:
            self._counts.update(self._history[-self._window :])

    @property
    def position(self) -> int:
        """The absolute position of the next token."""
        return len(self._history)

    @property
    def greedy(self) -> bool:
        """True when the temperature is 0: the distribution is one token."""
        return self.params.temperature == 0.0

    def push(self, token: int) -> None:
        """Step down a path: `token` is now the last one."""
        self._history.append(token)
        if self.params.penalises:
            self._counts[token] += 1
            if len(self._history) > self._window:
                self._drop(self._history[-self._window - 1])

    def pop(self, count: int) -> None:
        """Step back over the last `count` tokens."""
        for _ in range(count):
            token = self._history.pop()
            if self.params.penalises:
                self._drop(token)
                if len(self._history) >= self._window:
                    self._counts[self._history[-self._window]] += 1

    def _drop(self, token: int) -> None:
        self._counts[token] -= 1
        if not self._counts[token]:
            del self._counts[token]

    def token(self, logits: Logits, row: int) -> int:
        """The target's token in invariant mode: argmax(log p + noise), or argmax(logits) when greedy.

        The Gumbel-max trick with noise shared by target and draft (arXiv 2408.07978, section 3).
        """
        if self.greedy:
            return self._best(logits, row, 1)[0]
        tokens, scores = self.scores(logits, row)
        return int(tokens[scores.argmax()])

    def ranked(self, logits: Logits, row: int, count: int) -> list[int]:
        """The `count` best tokens by the same score, best first: children for a draft tree."""
        if self.greedy:
            return self._best(logits, row, count)
        tokens, scores = self.scores(logits, row)
        return [int(t) for t in tokens[np.argsort(-scores, kind="stable")[:count]]]

    def scores(self, logits: Logits, row: int) -> Candidates:
        """Candidates that survive the filters with log p + noise, up to a constant."""
        tokens, log_probs = self._chain(logits, row)
        return tokens, log_probs + gumbel(self.seed, Stream.TOKEN, self.position, tokens)

    def distribution(self, logits: Logits, row: int) -> Distribution:
        """The distribution after the whole chain."""
        if self.greedy:
            return Distribution.certain(self._best(logits, row, 1)[0])
        tokens, log_probs = self._chain(logits, row)
        return Distribution.normalised(tokens, np.exp(log_probs - log_probs.max()))

    def _best(self, logits: Logits, row: int, count: int) -> list[int]:
        if count == 1 and not self._counts and not len(self._biased):
            token = logits.greedy(row)
            self._check(logits.at(row, np.array([token])))
            return [token]
        tokens, values = self._candidates(logits, row, count)
        return [int(t) for t in tokens[np.argsort(-values, kind="stable")[:count]]]

    def _chain(self, logits: Logits, row: int) -> Candidates:
        params = self.params
        untouched = not self._counts and not len(self._biased)
        if (
            params.top_k == 0
            and params.min_p > 0
            and params.top_p >= 1
            and params.typical_p >= 1
            and untouched
        ):
            margin = -math.log(params.min_p) * params.temperature
            tokens, values = logits.above(row, margin * (1 + 1e-6) + 1e-6)
            self._check(values)
        else:
            tokens, values = self._candidates(logits, row, params.top_k)
        with np.errstate(over="ignore"):  # a tiny temperature: all but the best are impossible
            log_probs = (values - values.max()) / params.temperature
        return filtered(tokens, log_probs, params)

    def _candidates(self, logits: Logits, row: int, count: int) -> Candidates:
        """The `count` (0: all) largest logits after penalties and bias, and perhaps some more."""
        touched = self._touched(logits.vocab_size)
        # Penalised tokens may fall out of the best and biased ones rise into it: ask for that many
        # more, and put the touched ones in by hand.
        tokens, values = logits.top(row, count + len(touched) if count else 0)
        if len(touched):
            rest = ~np.isin(tokens, touched, assume_unique=True)
            tokens = np.concatenate([tokens[rest], touched])
            values = np.concatenate([values[rest], self._adjusted(touched, logits.at(row, touched))])
            order = np.argsort(tokens)
            tokens, values = tokens[order], values[order]
        self._check(values)
        return tokens, values

    def _check(self, values: NDArray[np.float64]) -> None:
        if not len(values) or not np.isfinite(values.max()):
            raise BackendError(
                f"the model's logits at position {self.position} are not numbers",
                "the file may be damaged or the cache type too coarse: try another file or --kv-type f16",
            )

    def _touched(self, vocab_size: int) -> NDArray[np.int64]:
        if not self._counts:
            return self._biased[self._biased < vocab_size]
        seen = np.fromiter(self._counts, np.int64, len(self._counts))
        touched = np.union1d(seen, self._biased)
        return touched[touched < vocab_size]

    def _adjusted(self, tokens: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        params = self.params
        if self._counts:
            counts = np.fromiter((self._counts[t] for t in tokens.tolist()), np.float64, len(tokens))
            seen = counts > 0
            factor = params.repetition_penalty
            values = np.where(seen, np.where(values > 0, values / factor, values * factor), values)
            values = values - counts * params.frequency_penalty - seen * params.presence_penalty
        if len(self._biased):
            place = np.searchsorted(self._biased, tokens)
            place = np.minimum(place, len(self._biased) - 1)
            values = values + np.where(self._biased[place] == tokens, self._bias[place], 0.0)
        return values


def filtered(tokens: NDArray[np.int64], log_probs: NDArray[np.float64], params: SamplingParams) -> Candidates:
    """Apply top-k, typical, top-p and min-p to candidates.

    Typical: Meister et al. 2023 (arXiv 2202.00666). Top-p: Holtzman et al. 2020 (arXiv 1904.09751).
    Min-p: arXiv 2407.01082. At least one candidate is kept. Ties fall to the lowest id.
    """
    if 0 < params.top_k < len(tokens):
        kept = np.sort(np.argsort(-log_probs, kind="stable")[: params.top_k])
        tokens, log_probs = tokens[kept], log_probs[kept]
    if params.typical_p < 1:
        probs = _softmax(log_probs)
        surprise = -np.log(np.maximum(probs, 1e-300))
        distance = np.abs(surprise - (probs * surprise).sum())
        kept = _nucleus(distance, probs, params.typical_p, guesses=(1.0, 4.0))
        tokens, log_probs = tokens[kept], log_probs[kept]
    if params.top_p < 1:
        probs = _softmax(log_probs)
        kept = _nucleus(-probs, probs, params.top_p, guesses=(-1e-3, -1e-5))
        tokens, log_probs = tokens[kept], log_probs[kept]
    if params.min_p > 0:
        kept = log_probs >= log_probs.max() + math.log(params.min_p)
        tokens, log_probs = tokens[kept], log_probs[kept]
    return tokens, log_probs


def _softmax(log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(log_probs - log_probs.max())
    probs: NDArray[np.float64] = weights / weights.sum()
    return probs


def _nucleus(
    rank: NDArray[np.float64], probs: NDArray[np.float64], mass: float, guesses: tuple[float, ...]
) -> NDArray[np.intp]:
    """Indices, ascending, of the fewest candidates of lowest rank that hold `mass` together.

    Sorting a whole vocabulary takes milliseconds, so the few below a guessed rank are tried first.
    """
    for guess in (*guesses, np.inf):
        near = np.flatnonzero(rank <= guess)
        if guess == np.inf or probs[near].sum() > mass:
            break
    order = near[np.argsort(rank[near], kind="stable")]
    size = int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1
    return np.sort(order[:size])
