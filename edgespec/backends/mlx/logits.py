"""Filter and sample logits on the device, so that only the resulting tokens are copied to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter as now
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, start_evaluation
from edgespec.engine.logits import HostLogits, best_on_host
from edgespec.engine.noise import Noise, Stream, key
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.quick_choice import Filters, split_filters

__all__ = ["DeviceLogits"]

# Number of top tokens to fetch beyond those requested, to detect ties with the last requested token.
_SPARE_CANDIDATES = 16
# Number of top tokens to fetch from the device first. If they are not enough, all logits are fetched.
_ABOVE_CANDIDATES = 64


_OnBestStarted: TypeAlias = Callable[[mx.array, "DeviceLogits"], None]


def _device_chain(processors: Sequence[LogitsProcessor], noise: Noise | None) -> Filters | None:
    """Return the processors' settings if all of them can run on the device, or None otherwise."""
    others, filters = split_filters(processors)
    if others or (filters is None) != (noise is None):
        return None
    return filters or Filters()


class DeviceLogits:
    """A pass's logits [rows, vocab], stored on the device.

    Each query fetches the results for all rows at once.

    Attributes:
        chosen: Best token in the last row, or None if it has not been fetched yet.
        vocab_size: Number of logits per row.
        other_tokens: Number of other replies' tokens in the pass. Always 0.
        waited_seconds: Total time that callers have waited for the device, in seconds.
        overlapped_seconds: Time in seconds spent launching the pass while the draft model was still running.
    """

    def __init__(
        self, rows: mx.array, depths: Sequence[int], on_best_started: _OnBestStarted | None = None
    ) -> None:
        """Store the logits of a pass.

        Args:
            rows: Logits [rows, vocab], possibly not evaluated yet.
            depths: Depth of each row's token in the token tree.
            on_best_started: Callback that launches the next pass. It receives the best token in the last row
                as an array (uint32 [1]) that the device is still computing.
        """
        self.chosen: int | None = None
        self._rows = rows.astype(mx.float32)
        self._depths = depths
        self._on_best_started = on_best_started
        self._fetched: dict[Any, Any] = {}
        self.vocab_size: int = rows.shape[1]
        self.other_tokens = 0
        self.waited_seconds = self.overlapped_seconds = 0.0

    def __len__(self) -> int:
        return len(self._depths)

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        chain = _device_chain(processors, noise)
        if chain is None:
            return best_on_host(self, row, count, processors, noise)
        seed, root = (noise.seed, noise.position - self._depths[row]) if noise else (0, 0)
        query = (count, chain, seed, root)
        if query not in self._fetched:
            is_last = count == 1 and row == len(self) - 1
            self._fetched[query] = self._fetch_best(*query, self._on_best_started if is_last else None)
        tokens, kept, peaks = self._fetched[query]
        return tokens[row][: kept[row]], peaks[row]

    def _fetch_best(
        self, count: int, chain: Filters, seed: int, root: int, on_best_started: _OnBestStarted | None
    ) -> tuple[Any, Any, Any]:
        rows = self._rows
        peaks = rows.max(axis=-1)
        kept = None
        if chain.temperature > 0.0:
            keys = _words(key(seed, Stream.TOKEN, root + depth) for depth in self._depths)
            tokens, kept = _drawn(rows, peaks, keys, count, chain)
        elif count == 1:
            tokens = mx.argmax(rows, axis=-1, keepdims=True)
        else:
            tokens = _largest(rows, count)[0]
        begin = now()
        results = [tokens, peaks] if kept is None else [tokens, peaks, kept]
        if on_best_started is not None:
            # Start computing the results now. Otherwise, the device would run the next pass first.
            start_evaluation(*results)
            on_best_started(tokens[-1], self)
        evaluate(*results)
        self.waited_seconds += now() - begin
        fetched: Any = tokens.tolist()
        if on_best_started is not None:
            self.chosen = fetched[-1][0]
        return fetched, [count] * len(self) if kept is None else kept.tolist(), peaks.tolist()

    def top(self, row: int, count: int) -> Candidates:
        if 0 < count < self.vocab_size - _SPARE_CANDIDATES:
            tokens, values = self._largest(row, count + _SPARE_CANDIDATES)
            if values[count - 1] != values[-1]:
                return _ascending(tokens, values, values >= values[count - 1])
        return self._host_row(row).top(0, count)

    def above(self, row: int, margin: float) -> Candidates:
        if self.vocab_size > _ABOVE_CANDIDATES:
            tokens, values = self._largest(row, _ABOVE_CANDIDATES)
            # Round the threshold down, so that rounding to float32 cannot exclude a logit equal to it.
            floor = np.nextafter(np.float32(float(values[0]) - margin), np.float32(-np.inf))
            if values[-1] < floor:
                return _ascending(tokens, values, values >= floor)
        return self._host_row(row).above(0, margin)

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._host(self._rows[row][mx.array(tokens)]).astype(np.float64)

    def limit_vocab(self, vocab_size: int) -> DeviceLogits:
        if vocab_size >= self.vocab_size:
            return self
        return DeviceLogits(self._rows[:, :vocab_size], self._depths, self._on_best_started)

    def _largest(self, row: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if count not in self._fetched:
            tokens, values = _largest(self._rows, count)
            fetched = self._host(values)
            self._fetched[count] = np.array(tokens).astype(np.int64), fetched
        tokens, values = self._fetched[count]
        return tokens[row], values[row]

    def _host_row(self, row: int) -> HostLogits:
        return HostLogits(self._host(self._rows[row])[None])

    def _host(self, array: mx.array) -> NDArray[np.float32]:
        begin = now()
        evaluate(array)
        self.waited_seconds += now() - begin
        return np.array(array)


def _ascending(tokens: NDArray[np.int64], values: NDArray[np.float32], keep: NDArray[np.bool_]) -> Candidates:
    order = np.argsort(tokens[keep])
    return tokens[keep][order], values[keep][order].astype(np.float64)


def _largest(rows: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the tokens and values [rows, count] of each row's `count` largest logits, largest first.

    Ties are sorted by token ID. If several logits equal the smallest returned one, an arbitrary subset of
    them is returned.
    """
    if count >= rows.shape[-1]:
        tokens = mx.broadcast_to(mx.arange(rows.shape[-1]), rows.shape)
    else:
        tokens = mx.sort(mx.argpartition(-rows, kth=count - 1, axis=-1)[:, :count], axis=-1)
    values = mx.take_along_axis(rows, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(tokens, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _drawn(
    rows: mx.array, peaks: mx.array, keys: mx.array, count: int, chain: Filters
) -> tuple[mx.array, mx.array | None]:
    """Sample `count` tokens for each row, best first, with the Gumbel-max trick.

    Filters the tokens as `engine.processors` does, but in single precision, and then chooses those with the
    largest sum of log-probability and Gumbel noise. `peaks` are the largest logits of the rows, and `keys`
    their keys for the noise generator, uint64 [rows].

    Returns:
        The tokens [rows, count], and how many of them in each row pass the filters (None if all do).
    """
    if chain.top_k > 0 or chain.top_p < 1:
        size = rows.shape[-1]
        candidates = min(chain.top_k or size, size)
        tokens, values = _largest(rows, min(candidates + _SPARE_CANDIDATES, size))
        tokens, values = tokens[:, :candidates], values[:, :candidates]
    else:
        tokens, values = mx.broadcast_to(mx.arange(rows.shape[-1]), rows.shape), rows
    log_probs = (values - peaks[:, None]) / chain.temperature
    scores = log_probs + _gumbel(keys, tokens)
    keep = None
    if chain.top_p < 1:
        probs = mx.softmax(log_probs, axis=-1, precise=True)
        keep = mx.cumsum(probs, axis=-1) - probs < chain.top_p
    if chain.min_p > 0:
        likely = log_probs >= math.log(chain.min_p)
        keep = likely if keep is None else keep & likely
    if keep is not None:
        scores = mx.where(keep, scores, -mx.inf)
    if count == 1:
        return mx.take_along_axis(tokens, mx.argmax(scores, axis=-1, keepdims=True), axis=-1), None
    place = mx.argsort(-scores, axis=-1)[:, :count]
    kept = None if keep is None else mx.minimum(keep.sum(axis=-1), count)
    return mx.take_along_axis(tokens, place, axis=-1), kept


def _words(values: Iterable[int]) -> mx.array:
    """Return integers as a uint64 array. Uses NumPy, because MLX rejects Python integers above 2^63 - 1."""
    return mx.array(np.fromiter(values, np.uint64))


_GOLDEN, _M1, _M2, _LAST = map(
    _words, ([0x9E3779B97F4A7C15], [0xBF58476D1CE4E5B9], [0x94D049BB133111EB], [2**52 - 1])
)


@partial(mx.compile, shapeless=True)
def _gumbel(keys: mx.array, tokens: mx.array) -> mx.array:
    """Return Gumbel noise [rows, n], equal to `engine.noise.gumbel` rounded to float32."""
    words = (tokens.astype(mx.uint64) ^ keys[:, None]) + _GOLDEN
    words = (words ^ (words >> 30)) * _M1
    words = (words ^ (words >> 27)) * _M2
    words = (words ^ (words >> 31)) >> 12
    unit = (words.astype(mx.float32) + 0.5) * 2.0**-52
    # Compute 1 - unit from the integers, because float32 is imprecise near 1.
    distance = ((_LAST - words).astype(mx.float32) + 0.5) * 2.0**-52
    return -mx.log(-mx.where(unit < 0.5, mx.log(unit), mx.log1p(-distance)))
