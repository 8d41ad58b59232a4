"""The logits of one pass, where the backend keeps them."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.sampling_params import Candidates, SamplingParams, filtered

__all__ = ["HostLogits", "Logits", "best_drawn", "survivors"]


class Logits(Protocol):
    """Rows of logits, one for each node of a pass. Valid until the backend's next pass.

    The sampler asks for the least it can do with, so that a backend may filter where the logits are
    and hand over candidates instead of whole rows.
    """

    vocab_size: int

    @property
    def waited_seconds(self) -> float:
        """How long calls have waited for the pass itself, where it runs on after `verify`."""

    @property
    def overlapped_seconds(self) -> float:
        """How long the pass was worked on before it was asked for, while the draft was made."""

    def __len__(self) -> int:
        """How many rows there are."""

    def best(
        self, row: int, count: int, params: SamplingParams, seed: int, position: int
    ) -> tuple[list[int], float]:
        """The `count` tokens of largest log p + noise, best first, and the largest logit of the row.

        p is softmax(logits) after temperature and filters, the noise that of `noise.gumbel` for this
        `seed` and `position` (of the token in the whole text, from 0); at temperature 0 they are the
        largest logits, lowest id first on ties. Penalties and bias are not looked at. Fewer come back when
        the filters leave fewer. The largest logit is as the model gave it, before temperature: where it is
        not finite, the row is not to be used.
        """

    def top(self, row: int, count: int) -> Candidates:
        """At least the `count` largest logits of a row, ties included: (ids ascending, logits)."""

    def above(self, row: int, margin: float) -> Candidates:
        """Every logit of a row within `margin` of its largest: (ids ascending, logits)."""

    def limit_vocab(self, vocab_size: int) -> Logits:
        """The same rows without the ids from `vocab_size` on."""

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits of `tokens` (int64 [n]) in a row: float64 [n]."""


def survivors(logits: Logits, row: int, params: SamplingParams) -> Candidates:
    """Logits of every token that temperature and filters may keep, and perhaps of some more."""
    if params.top_k == 0 and params.min_p > 0 and params.top_p >= 1 and params.typical_p >= 1:
        margin = -math.log(params.min_p) * params.temperature
        return logits.above(row, margin * (1 + 1e-6) + 1e-6)
    return logits.top(row, params.top_k)


def best_drawn(
    logits: Logits, row: int, count: int, params: SamplingParams, seed: int, position: int
) -> tuple[list[int], float]:
    """What `Logits.best` gives above temperature 0, worked out on the host in double precision."""
    tokens, values = survivors(logits, row, params)
    peak = float(values.max(initial=-np.inf))
    if not np.isfinite(peak):
        return [], peak
    tokens, scores = filtered(tokens, values, params)
    scores = scores + gumbel(seed, Stream.TOKEN, position, tokens)
    if count == 1:
        return [int(tokens[scores.argmax()])], peak
    return tokens[np.argsort(-scores, kind="stable")[:count]].tolist(), peak


class HostLogits:
    """Logits in ordinary memory: float32 [rows, vocab], a view that is never copied whole."""

    __slots__ = ("overlapped_seconds", "rows", "vocab_size", "waited_seconds")

    _BLOCK = 64

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.rows = rows
        self.vocab_size = rows.shape[1]
        self.waited_seconds = self.overlapped_seconds = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def best(
        self, row: int, count: int, params: SamplingParams, seed: int, position: int
    ) -> tuple[list[int], float]:
        if params.temperature > 0.0:
            return best_drawn(self, row, count, params, seed, position)
        if count == 1:
            token = int(self.rows[row].argmax())
            return [token], float(self.rows[row][token])
        tokens, values = self.top(row, count)
        ranking = np.argsort(-values, kind="stable")[:count]
        return tokens[ranking].tolist(), float(values.max(initial=-np.inf))

    def top(self, row: int, count: int) -> Candidates:
        logits = self.rows[row]
        blocks = len(logits) // self._BLOCK
        if count <= 0 or blocks <= count:
            if 0 < count < len(logits):
                floor = np.partition(logits, len(logits) - count)[len(logits) - count]
                return self._from(logits, floor)
            return np.arange(len(logits)), logits.astype(np.float64)
        # In interleaved blocks, the count-th largest block maximum is no larger than the count-th largest
        # logit: a floor for two cheap passes, where a partition of the row would cost a millisecond.
        peaks = logits[: blocks * self._BLOCK].reshape(self._BLOCK, blocks).max(axis=0)
        return self._from(logits, np.partition(peaks, blocks - count)[blocks - count])

    def above(self, row: int, margin: float) -> Candidates:
        logits = self.rows[row]
        # Rounded down, or a logit at the very edge would be lost.
        return self._from(logits, np.nextafter(np.float32(float(logits.max()) - margin), np.float32(-np.inf)))

    def limit_vocab(self, vocab_size: int) -> HostLogits:
        return self if vocab_size >= self.vocab_size else HostLogits(self.rows[:, :vocab_size])

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.rows[row][tokens].astype(np.float64)
        return values

    @staticmethod
    def _from(logits: NDArray[np.float32], floor: np.float32) -> Candidates:
        ids = np.flatnonzero(logits >= floor)
        return ids, logits[ids].astype(np.float64)
