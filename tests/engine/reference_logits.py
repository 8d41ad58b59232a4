"""Logits in host memory, implemented as simply as possible, as a reference for the engine's fast searches.

Each token is found by running the sampling chain on candidates from two passes over the row, with noise for
everything that the filters keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import HostLogits
from edgespec.engine.noise import Noise, Stream, key
from edgespec.engine.processors import Candidates, LogitsProcessor, Temperature, apply_chain, max_logit

__all__ = ["ReferenceLogits", "reference_gumbel"]

_GROUP = 64


class ReferenceLogits(HostLogits):
    """Logits in host memory, as a float32 array of shape [rows, vocab]."""

    __slots__ = ()

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        if count == 1 and noise is None and not processors:
            token = int(self.rows[row].argmax())
            return [token], float(self.rows[row][token])
        found, peak = _candidates(self, row, processors, 0 if noise else count)
        if not np.isfinite(peak):
            return [], peak
        tokens, scores = apply_chain(processors, found)
        if max_logit(scores) == -np.inf:
            return [], peak
        if noise:
            scores = scores + reference_gumbel(noise.seed, Stream.TOKEN, noise.position, tokens)
        if count == 1:
            return [int(tokens[scores.argmax()])], peak
        best = np.argsort(-scores, kind="stable")[:count]
        return tokens[best[scores[best] > -np.inf]].tolist(), peak

    def top(self, row: int, count: int) -> Candidates:
        logits = self.rows[row]
        groups = len(logits) // _GROUP
        if not 0 < count < len(logits):
            return np.arange(len(logits)), logits.astype(np.float64)
        if groups <= count:
            return _at_least(logits, np.partition(logits, -count)[-count])
        peaks = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        return _at_least(logits, np.partition(peaks, -count)[-count])

    def above(self, row: int, margin: float) -> Candidates:
        logits = self.rows[row]
        floor = np.nextafter(np.float32(float(logits.max()) - margin), np.float32(-np.inf))
        return _at_least(logits, floor)


def reference_gumbel(
    seed: int, stream: Stream, position: int, tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute the noise of `noise.gumbel` with NumPy, for any number of tokens."""
    words = tokens.astype(np.uint64) ^ np.uint64(key(seed, stream, position))
    words += np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    unit = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(unit))
    return noise


def _at_least(logits: NDArray[np.float32], floor: np.float32) -> Candidates:
    tokens = np.flatnonzero(logits >= floor)
    return tokens, logits[tokens].astype(np.float64)


def _candidates(
    logits: HostLogits, row: int, processors: Sequence[LogitsProcessor], count: int
) -> tuple[Candidates, float]:
    touched, scale = np.zeros(0, np.int64), 1.0
    for processor in processors:
        limit, margin = processor.max_candidates(), processor.max_margin()
        if limit is not None:
            count = limit
            break
        if margin is not None and not len(touched):
            found = logits.above(row, margin * scale * (1 + 1e-6) + 1e-6)
            return found, float(found[1].max(initial=-np.inf))
        more = processor.touched_tokens(logits.vocab_size)
        if more is None:
            count = 0
            break
        touched = np.union1d(touched, more) if len(touched) else more
        if isinstance(processor, Temperature):
            scale = processor.temperature
    tokens, values = logits.top(row, count + len(touched) if count else 0)
    peak = float(values.max(initial=-np.inf))
    if count and len(touched):
        rest = ~np.isin(tokens, touched, assume_unique=True)
        tokens = np.concatenate([tokens[rest], touched])
        values = np.concatenate([values[rest], logits.at(row, touched)])
        order = np.argsort(tokens)
        tokens, values = tokens[order], values[order]
    return (tokens, values), peak
