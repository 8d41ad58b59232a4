"""The logits of one pass, in host or device memory, and functions that select tokens from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.processors import Candidates, LogitsProcessor, Temperature, apply_chain, max_logit

__all__ = ["HostLogits", "Logits", "Noise", "best_on_host", "candidates"]


class Noise(NamedTuple):
    """Seed and position that determine the Gumbel noise for sampling one token. See `noise.gumbel`."""

    seed: int
    position: int


class Logits(Protocol):
    """The logits of one model pass, with one row per token. Valid until the model's next pass.

    The sampler requests only tokens that can be sampled, so a device backend can filter on the device and
    return a few candidates instead of copying whole rows.
    """

    vocab_size: int

    @property
    def waited_seconds(self) -> float:
        """Seconds spent waiting for the model's pass to finish before these logits could be read."""

    @property
    def overlapped_seconds(self) -> float:
        """Seconds during which drafting and the model's pass ran at the same time."""

    @property
    def other_tokens(self) -> int:
        """Number of tokens in the pass that belong to other replies."""

    def __len__(self) -> int:
        """Return the number of rows, which is the number of the reply's own tokens in the pass."""

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        """Return the `count` best tokens of a row after all logits processors, best first.

        A backend that cannot run every processor on its device calls `best_on_host`. Ties are sorted by token
        id.

        Args:
            row: Index of the row.
            count: Maximum number of tokens. Filters may leave fewer.
            processors: The logits processors, in order.
            noise: The Gumbel noise to add to the log-probabilities. If None, tokens are ranked by logit, as
                at temperature 0.

        Returns:
            The tokens, and the largest logit of the row before processing. If it is not finite, the row is
            invalid.
        """

    def top(self, row: int, count: int) -> Candidates:
        """Return at least the `count` largest logits of a row, including ties, or all if `count` is 0."""

    def above(self, row: int, margin: float) -> Candidates:
        """Return all logits of a row that are within `margin` of the largest one."""

    def limit_vocab(self, vocab_size: int) -> Logits:
        """Return the same logits without token ids of `vocab_size` and above."""

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits of the given tokens in one row, as float64 [n]."""


def best_on_host(
    logits: Logits, row: int, count: int, processors: Sequence[LogitsProcessor], noise: Noise | None
) -> tuple[list[int], float]:
    """Implement `Logits.best` on the host in double precision."""
    found, peak = candidates(logits, row, processors, 0 if noise else count)
    if not np.isfinite(peak):
        return [], peak
    tokens, scores = apply_chain(processors, found)
    if max_logit(scores) == -np.inf:
        return [], peak
    if noise:
        scores = scores + gumbel(noise.seed, Stream.TOKEN, noise.position, tokens)
    if count == 1:
        return [int(tokens[scores.argmax()])], peak
    best = np.argsort(-scores, kind="stable")[:count]
    return tokens[best[scores[best] > -np.inf]].tolist(), peak


def candidates(
    logits: Logits, row: int, processors: Sequence[LogitsProcessor], count: int = 0
) -> tuple[Candidates, float]:
    """Return all tokens of a row that the logits processors might keep, without running them.

    Args:
        logits: The logits of the pass.
        row: Index of the row.
        processors: The logits processors, in order.
        count: Number of top tokens needed, or 0 for all. Overridden by filters such as top-k.

    Returns:
        The candidates, which can include tokens that the processors will drop, and the row's largest logit.
    """
    touched, scale = np.zeros(0, np.int64), 1.0
    for processor in processors:
        limit, margin = processor.max_candidates(), processor.max_margin()
        if limit is not None:
            count = limit
            break
        if margin is not None and not len(touched):
            # Widen the margin slightly, so that rounding cannot exclude a token that the processor would
            # keep.
            found = logits.above(row, margin * scale * (1 + 1e-6) + 1e-6)
            return found, float(found[1].max(initial=-np.inf))
        more = processor.touched_tokens(logits.vocab_size)
        if more is None:
            count = 0
            break
        touched = np.union1d(touched, more) if len(touched) else more
        if isinstance(processor, Temperature):
            scale = processor.temperature
    # Fetch extra tokens, because the logits processors can make some of the top tokens less likely.
    tokens, values = logits.top(row, count + len(touched) if count else 0)
    peak = float(values.max(initial=-np.inf))
    if count and len(touched):
        rest = ~np.isin(tokens, touched, assume_unique=True)
        tokens = np.concatenate([tokens[rest], touched])
        values = np.concatenate([values[rest], logits.at(row, touched)])
        order = np.argsort(tokens)
        tokens, values = tokens[order], values[order]
    return (tokens, values), peak


class HostLogits:
    """Logits in host memory, as a float32 array of shape [rows, vocab]."""

    __slots__ = ("other_tokens", "overlapped_seconds", "rows", "vocab_size", "waited_seconds")

    _BLOCK = 64

    def __init__(self, rows: NDArray[np.float32], other_tokens: int = 0) -> None:
        self.rows = rows
        self.other_tokens = other_tokens
        self.vocab_size = rows.shape[1]
        self.waited_seconds = self.overlapped_seconds = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        if count == 1 and noise is None and not processors:
            token = int(self.rows[row].argmax())
            return [token], float(self.rows[row][token])
        return best_on_host(self, row, count, processors, noise)

    def top(self, row: int, count: int) -> Candidates:
        logits = self.rows[row]
        blocks = len(logits) // self._BLOCK
        if not 0 < count < len(logits):
            return np.arange(len(logits)), logits.astype(np.float64)
        if blocks <= count:
            return self._from(logits, np.partition(logits, -count)[-count])
        peaks = logits[: blocks * self._BLOCK].reshape(self._BLOCK, blocks).max(axis=0)
        return self._from(logits, np.partition(peaks, -count)[-count])

    def above(self, row: int, margin: float) -> Candidates:
        logits = self.rows[row]
        return self._from(logits, np.nextafter(np.float32(float(logits.max()) - margin), np.float32(-np.inf)))

    def limit_vocab(self, vocab_size: int) -> HostLogits:
        return (
            self
            if vocab_size >= self.vocab_size
            else HostLogits(self.rows[:, :vocab_size], self.other_tokens)
        )

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.rows[row][tokens].astype(np.float64)
        return values

    @staticmethod
    def _from(logits: NDArray[np.float32], floor: np.float32) -> Candidates:
        ids = np.flatnonzero(logits >= floor)
        return ids, logits[ids].astype(np.float64)
