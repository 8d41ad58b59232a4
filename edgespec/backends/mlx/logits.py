"""Logits that stay on the device: filtered, drawn from and compared there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter as now
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, start_evaluation
from edgespec.engine.logits import HostLogits, Noise, best_on_host
from edgespec.engine.noise import Stream, key
from edgespec.engine.processors import Candidates, LogitsProcessor, MinP, Temperature, TopK, TopP

__all__ = ["DeviceLogits"]

# How many more candidates are fetched than asked for, so that ties at the edge are seen.
_SPARE = 16
_FEW = 64


class _DeviceChain(NamedTuple):
    """The settings of a sampling chain that the device code implements. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


# The processors that the device code implements, in the only order in which it applies them.
_ON_DEVICE = (Temperature, TopK, TopP, MinP)


def _device_chain(processors: Sequence[LogitsProcessor], noise: Noise | None) -> _DeviceChain | None:
    """Return the settings of a chain that can run on the device, or None if it must run on the host.

    This is an allowlist of exact types: a chain with any other processor runs on the host.
    """
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in _ON_DEVICE if kind in kinds] or (Temperature in kinds) != bool(noise):
        return None
    chain = _DeviceChain()
    for processor in processors:
        match processor:
            case Temperature(temperature):
                chain = chain._replace(temperature=temperature)
            case TopK(k):
                chain = chain._replace(top_k=k)
            case TopP(mass):
                chain = chain._replace(top_p=mass)
            case MinP(share):
                chain = chain._replace(min_p=share)
    return chain


class DeviceLogits:
    """Logits of a pass, [rows, vocab] on the device; one answer for all rows is fetched at a time.

    depths: how deep each row's token stands in its tree; noise depends on the position.
    started: called with the device's token (uint32 [1]) as soon as the best of the last row is being
    computed, so that the next step can be begun before anybody waits. chosen: that token, once it is known.
    """

    def __init__(
        self,
        rows: mx.array,
        depths: Sequence[int],
        started: Callable[[mx.array, DeviceLogits], None] | None = None,
    ) -> None:
        self.chosen: int | None = None
        self._rows = rows.astype(mx.float32)
        self._depths = depths
        self._started = started
        self._fetched: dict[Any, Any] = {}
        self.vocab_size: int = rows.shape[1]
        self.waited_seconds = self.overlapped_seconds = 0.0

    def __len__(self) -> int:
        return len(self._depths)

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        chain = _device_chain(processors, noise)
        if chain is None:
            return best_on_host(self, row, count, processors, noise)
        root = noise.position - self._depths[row] if noise else 0
        key_of_answer = (count, chain, noise and noise.seed, root)
        if key_of_answer not in self._fetched:
            started = self._started if count == 1 and row == len(self) - 1 else None
            seed = noise.seed if noise else 0
            self._fetched[key_of_answer] = self._fetch_best(count, chain, seed, root, started)
        tokens, kept, peaks = self._fetched[key_of_answer]
        return tokens[row][: kept[row]], peaks[row]

    def _fetch_best(
        self,
        count: int,
        chain: _DeviceChain,
        seed: int,
        root: int,
        started: Callable[[mx.array, DeviceLogits], None] | None,
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
        asked_at = now()
        asked = [tokens, peaks] if kept is None else [tokens, peaks, kept]
        if started is not None:
            # All that is waited for is queued first, or it would be computed after the next step.
            start_evaluation(*asked)
            started(tokens[-1], self)
        evaluate(*asked)
        self.waited_seconds += now() - asked_at
        found: Any = tokens.tolist()
        if started is not None:
            self.chosen = found[-1][0]
        return found, [count] * len(self) if kept is None else kept.tolist(), peaks.tolist()

    def top(self, row: int, count: int) -> Candidates:
        wanted = count + _SPARE
        if count <= 0 or wanted >= self.vocab_size:
            return self._row(row).top(0, count)
        tokens, values = self._largest(wanted)
        tokens, values = tokens[row], values[row]
        if values[count - 1] == values[-1]:  # a tie that may go on
            return self._row(row).top(0, count)
        return _ascending(tokens, values, values >= values[count - 1])

    def above(self, row: int, margin: float) -> Candidates:
        if self.vocab_size <= _FEW:
            return self._row(row).above(0, margin)
        tokens, values = self._largest(_FEW)
        tokens, values = tokens[row], values[row]
        # Rounded down, or a logit at the very edge would be lost.
        floor = np.nextafter(np.float32(float(values[0]) - margin), np.float32(-np.inf))
        if not values[-1] < floor:
            return self._row(row).above(0, margin)
        return _ascending(tokens, values, values >= floor)

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self._host(self._rows[row][mx.array(tokens)]).astype(np.float64)
        return values

    def limit_vocab(self, vocab_size: int) -> DeviceLogits:
        if vocab_size >= self.vocab_size:
            return self
        return DeviceLogits(self._rows[:, :vocab_size], self._depths, self._started)

    def _largest(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The `count` largest of every row, best first, lowest id first on ties."""
        if count not in self._fetched:
            tokens, values = _largest(self._rows, count)
            fetched = self._host(values)
            self._fetched[count] = np.array(tokens).astype(np.int64), fetched
        found: tuple[NDArray[np.int64], NDArray[np.float32]] = self._fetched[count]
        return found

    def _row(self, row: int) -> HostLogits:
        """One whole row, brought here: for settings that filter nothing out."""
        return HostLogits(self._host(self._rows[row])[None])

    def _host(self, array: mx.array) -> NDArray[np.float32]:
        started = now()
        evaluate(array)
        self.waited_seconds += now() - started
        return np.array(array)


def _ascending(tokens: NDArray[np.int64], values: NDArray[np.float32], keep: NDArray[np.bool_]) -> Candidates:
    order = np.argsort(tokens[keep])
    return tokens[keep][order], values[keep][order].astype(np.float64)


def _largest(rows: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(tokens, logits) [rows, count], best first, lowest id first among those that were picked."""
    if count >= rows.shape[-1]:
        tokens = mx.broadcast_to(mx.arange(rows.shape[-1]), rows.shape)
    else:
        tokens = mx.sort(mx.argpartition(-rows, kth=count - 1, axis=-1)[:, :count], axis=-1)
    values = mx.take_along_axis(rows, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(tokens, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _drawn(
    rows: mx.array, peaks: mx.array, keys: mx.array, count: int, chain: _DeviceChain
) -> tuple[mx.array, mx.array | None]:
    """The `count` tokens of largest log p + noise of each row, and how many the filters kept (None: all).

    The same chain as the classes in `engine.processors`, in single precision.
    """
    if chain.top_k > 0 or chain.top_p < 1:
        size = rows.shape[-1]
        wanted = min(chain.top_k or size, size)
        tokens, values = _largest(rows, min(wanted + _SPARE, size))
        tokens, values = tokens[:, :wanted], values[:, :wanted]
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
    if count == 1:  # the best of all is always kept
        return mx.take_along_axis(tokens, mx.argmax(scores, axis=-1, keepdims=True), axis=-1), None
    place = mx.argsort(-scores, axis=-1)[:, :count]
    kept = None if keep is None else mx.minimum(keep.sum(axis=-1), count)
    return mx.take_along_axis(tokens, place, axis=-1), kept


def _words(values: Iterable[int]) -> mx.array:
    """uint64 [n]; MLX takes large ones from numpy only."""
    return mx.array(np.fromiter(values, np.uint64))


_GOLDEN, _M1, _M2, _LAST = map(
    _words, ([0x9E3779B97F4A7C15], [0xBF58476D1CE4E5B9], [0x94D049BB133111EB], [2**52 - 1])
)


@partial(mx.compile, shapeless=True)
def _gumbel(keys: mx.array, tokens: mx.array) -> mx.array:
    """The noise of `engine.noise.gumbel`, rounded to float32: keys uint64 [rows], tokens [rows, n]."""
    words = tokens.astype(mx.uint64) ^ keys[:, None]
    words = words + _GOLDEN
    words = (words ^ (words >> 30)) * _M1
    words = (words ^ (words >> 27)) * _M2
    words = (words ^ (words >> 31)) >> 12
    # Close to 1 a float has no digits left: what is missing to 1 has them.
    unit = (words.astype(mx.float32) + 0.5) * 2.0**-52
    missing = ((_LAST - words).astype(mx.float32) + 0.5) * 2.0**-52
    return -mx.log(-mx.where(unit < 0.5, mx.log(unit), mx.log1p(-missing)))
