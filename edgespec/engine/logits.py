"""Logits of one pass, in host or device memory, and functions that select tokens from them.

Also computes the log-probabilities of emitted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.noise import Noise, Stream, gumbel
from edgespec.engine.processors import Candidates, LogitsProcessor, Temperature, apply_chain, max_logit
from edgespec.engine.quick_choice import choose_from_row, choose_token, split_filters

__all__ = [
    "HostLogits",
    "Logits",
    "TokenLogprob",
    "best_on_host",
    "candidates",
    "token_logprob",
    "token_logprobs",
]

_NO_TOKENS = np.zeros(0, np.int64)


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
        """Seconds during which drafting overlapped with the model's pass."""

    @property
    def other_tokens(self) -> int:
        """Number of tokens in the pass that belong to other replies."""

    def __len__(self) -> int:
        """Return the number of rows, which equals the number of this reply's tokens in the pass."""

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        """Return the `count` highest-scoring tokens of a row after all logits processors, best first.

        A backend that cannot run every processor on its device calls `best_on_host`. Ties are ordered by
        token id.

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
        """Return these logits restricted to token ids below `vocab_size`."""

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits of the given tokens in one row, as float64 [n]."""


def best_on_host(
    logits: Logits, row: int, count: int, processors: Sequence[LogitsProcessor], noise: Noise | None
) -> tuple[list[int], float]:
    """Implement `Logits.best` on the host in double precision."""
    filters = None
    if noise and count == 1:
        before, filters = split_filters(processors)
        if filters and not before and not filters.top_k and isinstance(logits, HostLogits):
            chosen = choose_from_row(logits.rows[row], partial(logits.top, row), filters, noise)
            if chosen:
                return [chosen[0]], chosen[1]
    found, peak = candidates(logits, row, processors, 0 if noise else count)
    if not math.isfinite(peak):
        return [], peak
    if noise and filters:
        found, processors = apply_chain(before, found), processors[len(before) :]
        token = choose_token(found, filters, noise)
        if token is not None:
            return [token], peak
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
    touched, scale = _NO_TOKENS, 1.0
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
        if len(more):
            touched = np.union1d(touched, more) if len(touched) else more
        if isinstance(processor, Temperature):
            scale = processor.temperature
    # Fetch extra tokens, because the logits processors can make some of the top tokens less likely.
    tokens, values = logits.top(row, count + len(touched) if count else 0)
    peak = float(values.max(initial=-np.inf))
    if count and len(touched):
        if not np.all(touched[1:] > touched[:-1]):
            touched = np.unique(touched)
        at = np.minimum(touched.searchsorted(tokens), len(touched) - 1)
        rest = touched[at] != tokens
        tokens = np.concatenate([tokens[rest], touched])
        values = np.concatenate([values[rest], logits.at(row, touched)])
        order = np.argsort(tokens)
        tokens, values = tokens[order], values[order]
    return (tokens, values), peak


class HostLogits:
    """Logits in host memory, as a float32 array of shape [rows, vocab]."""

    __slots__ = ("other_tokens", "overlapped_seconds", "rows", "vocab_size", "waited_seconds")

    # Tokens per group in `_peaks`. A row is read once to find the peak of each group. Only groups whose peak
    # is large enough are read a second time.
    _GROUP = 64
    # Minimum vocabulary size for using `_peaks`. For smaller vocabularies, reading the whole row twice is
    # just as fast.
    _MIN_VOCABULARY = 1 << 15

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
        if not 0 < count < len(logits):
            return np.arange(len(logits)), logits.astype(np.float64)
        peaks = self._peaks(logits)
        if len(peaks) <= count:
            return self._at_least(logits, np.partition(logits, -count)[-count], None)
        return self._at_least(logits, np.partition(peaks, -count)[-count], peaks)

    def above(self, row: int, margin: float) -> Candidates:
        logits = self.rows[row]
        peaks = self._peaks(logits) if len(logits) >= self._MIN_VOCABULARY else None
        if peaks is None:
            peak = logits.max()
        else:
            rest = logits[len(peaks) * self._GROUP :]
            peak = np.maximum(peaks.max(), rest.max(initial=-np.inf))
        floor = np.nextafter(np.float32(float(peak) - margin), np.float32(-np.inf))
        return self._at_least(logits, floor, peaks)

    def limit_vocab(self, vocab_size: int) -> HostLogits:
        return (
            self
            if vocab_size >= self.vocab_size
            else HostLogits(self.rows[:, :vocab_size], self.other_tokens)
        )

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.rows[row][tokens].astype(np.float64)
        return values

    def _peaks(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the largest logit of each group of `_GROUP` tokens whose ids are a fixed distance apart."""
        groups = len(logits) // self._GROUP
        if not groups:
            return logits[:0]
        peaks: NDArray[np.float32] = logits[: groups * self._GROUP].reshape(self._GROUP, groups).max(axis=0)
        return peaks

    def _at_least(
        self, logits: NDArray[np.float32], floor: np.float32, peaks: NDArray[np.float32] | None
    ) -> Candidates:
        """Return all logits of at least `floor`. Passing `peaks` can make the search faster."""
        if peaks is not None and len(logits) >= self._MIN_VOCABULARY:
            groups = len(peaks)
            grouped = logits[: groups * self._GROUP].reshape(self._GROUP, groups)
            # Include groups whose peak is NaN, because they may contain logits above the floor.
            (hit,) = (~(peaks < floor)).nonzero()
            if len(hit) <= groups // 8:
                step, group = (grouped.take(hit, axis=1) >= floor).nonzero()
                ids = step * groups + hit[group]
                if grouped.size < len(logits):
                    (rest,) = (logits[grouped.size :] >= floor).nonzero()
                    ids = np.concatenate([ids, rest + grouped.size])
                return ids, logits[ids].astype(np.float64)
        (ids,) = (logits >= floor).nonzero()
        return ids, logits[ids].astype(np.float64)


class TokenLogprob(NamedTuple):
    """A token's log-probability, and those of the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: Logits, row: int, token: int, count: int) -> TokenLogprob:
    """Return the log-probability of a token and of the `count` most likely tokens.

    The log-probabilities are the model's own, before constraints, penalties, temperature and filters.

    Args:
        logits: The logits of the target's pass.
        row: The row of the preceding token.
        token: The token to score.
        count: Number of most likely tokens. Equally likely tokens are sorted by id.
    """
    _, values = logits.top(row, 0)
    peak = values.max()
    total = peak + np.log(np.exp(values - peak).sum())
    best: list[int] = []
    if count:
        tokens, largest = logits.top(row, count)
        best = tokens[np.argsort(-largest, kind="stable")[:count]].tolist()
    return TokenLogprob(
        token, float(values[token] - total), tuple((each, float(values[each] - total)) for each in best)
    )


def token_logprobs(
    logits: Logits, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of emitted tokens. See `token_logprob`.

    Args:
        logits: The logits of the target's pass.
        nodes: The root and the accepted nodes of the draft tree. Can be longer than `tokens`.
        tokens: The emitted tokens. Each one follows the node at the same index.
        count: Number of most likely tokens.
    """
    pairs = zip(nodes, tokens, strict=False)
    return tuple(token_logprob(logits, node, token, count) for node, token in pairs)
