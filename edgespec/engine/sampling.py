"""From logits to a distribution to a token: the sampler chain of one reply.

Order of the chain: penalties and bias on the logits, temperature, top-k, typical, top-p, min-p,
renormalise. It works on candidate sets: what a filter is sure to discard is never computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits, survivors
from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.sampling_params import Candidates, SamplingParams, filtered
from edgespec.errors import BackendError

__all__ = ["Sampler"]


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
        return self.ranked(logits, row, 1)[0]

    def ranked(self, logits: Logits, row: int, count: int) -> list[int]:
        """The `count` best tokens by the same score, best first: children for a draft tree."""
        # Which of the two ways is taken depends on the settings alone: they may round differently.
        if not self.params.penalises and not len(self._biased):
            tokens, peak = logits.best(row, count, self.params, self.seed, self.position)
            self._check(peak)
            return tokens
        if self.greedy:
            ids, scores = self._candidates(logits, row, count)
        else:
            ids, scores = self.scores(logits, row)
        return [int(t) for t in ids[np.argsort(-scores, kind="stable")[:count]]]

    def scores(self, logits: Logits, row: int) -> Candidates:
        """Candidates that survive the filters with log p + noise, up to a constant."""
        tokens, log_probs = self._chain(logits, row)
        return tokens, log_probs + gumbel(self.seed, Stream.TOKEN, self.position, tokens)

    def distribution(self, logits: Logits, row: int) -> Distribution:
        """The distribution after the whole chain."""
        if self.greedy:
            return Distribution.certain(self.token(logits, row))
        tokens, log_probs = self._chain(logits, row)
        return Distribution.normalised(tokens, np.exp(log_probs - log_probs.max()))

    def _chain(self, logits: Logits, row: int) -> Candidates:
        if not self._counts and not len(self._biased):
            tokens, values = survivors(logits, row, self.params)
            self._check(values.max(initial=-np.inf))
        else:
            tokens, values = self._candidates(logits, row, self.params.top_k)
        return filtered(tokens, values, self.params)

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
        self._check(values.max(initial=-np.inf))
        return tokens, values

    def _check(self, peak: float) -> None:
        if not np.isfinite(peak):
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
