"""The sampling chain in a single function, as an independent reference for `engine.processors`.

It performs the same floating-point operations in the same order, so results must agree to the last bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.processors import Candidates
from edgespec.engine.sampling_params import SamplingParams


def chain(row: NDArray[np.float32], params: SamplingParams, history: Sequence[int]) -> Candidates:
    """Return the tokens that survive all filters and their log-probabilities up to a constant."""
    tokens, logits = np.arange(len(row)), modified(row, params, history)
    with np.errstate(over="ignore"):
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
        kept = np.flatnonzero(log_probs >= log_probs.max() + math.log(params.min_p))
        tokens, log_probs = tokens[kept], log_probs[kept]
    return tokens, log_probs


def modified(row: NDArray[np.float32], params: SamplingParams, history: Sequence[int]) -> NDArray[np.float64]:
    """Return all logits after penalties and bias."""
    values = row.astype(np.float64)
    if params.has_penalties:
        width = len(history) if params.penalty_window < 0 else min(len(history), params.penalty_window)
        counted = Counter(history[len(history) - width :])
        counts = np.array([counted[token] for token in range(len(row))], np.float64)
        factor = params.repetition_penalty
        penalised = np.where(values > 0, values / factor, values * factor)
        penalised = penalised - counts * params.frequency_penalty - 1.0 * params.presence_penalty
        values = np.where(counts > 0, penalised, values)
    for token, bias in params.logit_bias.items():
        if token < len(row):
            values[token] += bias
    return values


def ranked(
    row: NDArray[np.float32], params: SamplingParams, history: Sequence[int], seed: int, count: int
) -> list[int]:
    """Return the `count` tokens of the largest score, best first."""
    if params.temperature == 0:
        scores = modified(row, params, history)
        tokens = np.arange(len(row))
    else:
        tokens, scores = chain(row, params, history)
        scores = scores + gumbel(seed, Stream.TOKEN, len(history), tokens)
    best = np.argsort(-scores, kind="stable")[:count]
    return [int(token) for token in tokens[best] if scores[np.searchsorted(tokens, token)] > -np.inf]


def _softmax(log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(log_probs - log_probs.max())
    probs: NDArray[np.float64] = weights / weights.sum()
    return probs


def _nucleus(
    rank: NDArray[np.float64], probs: NDArray[np.float64], mass: float, guesses: tuple[float, ...]
) -> NDArray[np.intp]:
    for guess in (*guesses, np.inf):
        near = np.flatnonzero(rank <= guess)
        if guess == np.inf or probs[near].sum() > mass:
            break
    order = near[np.argsort(rank[near], kind="stable")]
    size = int(np.searchsorted(np.cumsum(probs[order]), mass, side="left")) + 1
    return np.sort(order[:size])
