"""The sampler chain: its settings, and the filters that cut a distribution down to its candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import OptionError

__all__ = ["Candidates", "SamplingParams", "filtered"]

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


def filtered(tokens: NDArray[np.int64], logits: NDArray[np.float64], params: SamplingParams) -> Candidates:
    """Apply temperature, top-k, typical, top-p and min-p to candidates: log-probabilities up to a constant.

    Typical: Meister et al. 2023 (arXiv 2202.00666). Top-p: Holtzman et al. 2020 (arXiv 1904.09751).
    Min-p: arXiv 2407.01082. At least one candidate is kept. Ties fall to the lowest id.
    """
    with np.errstate(over="ignore"):  # a tiny temperature: all but the best are impossible
        log_probs = (logits - logits.max()) / params.temperature
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
