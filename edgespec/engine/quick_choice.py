"""Sample a token faster than the usual filters do, but with the same result.

`processors` defines which token is sampled from a row of logits. Its filters take most of the sampling time,
because each of them runs a dozen NumPy operations on a few dozen tokens, or computes the probability of every
token. This module instead sorts the candidates once, and computes noise only for those that can be chosen. It
adds numbers in a different order, so the last bits of its sums differ. Where this could change the result,
the functions return None, and the caller applies the filters.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.noise import Noise, Stream, gumbel, tokens_with_noise_above
from edgespec.engine.processors import (
    Candidates,
    LogitsProcessor,
    MinP,
    Temperature,
    TopK,
    TopP,
)

__all__ = ["Filters", "choose_from_row", "choose_token", "split_filters"]

# Maximum number of candidates for the fast path. If there are more, the filters are just as fast.
_MAX_CANDIDATES = 4096
# Minimum vocabulary size for the fast path. For smaller vocabularies, the filters are as fast as searching
# the row.
_MIN_VOCABULARY = 1 << 14
# Numbers of most likely tokens to search for the nucleus and the highest-scoring token. The second number is
# used only if the first is too small.
_NUCLEUS_SIZES = (64, 1024)
# Log-probabilities that differ by less than this may come from equal probabilities.
_SAME_LOG_PROB = 1e-12
# Maximum relative rounding error when summing up to a million probabilities in double precision.
_SUM_TOLERANCE = 1e-9
# Maximum relative rounding error when summing the same number of probabilities in single precision, including
# the error of the exponential function for arguments down to -104, below which its result is 0.
_FLOAT32_SUM_TOLERANCE = 3e-5
# Logits per block when adding up the probabilities in a row. A block fits into a core's cache, and its memory
# is small enough for malloc to reuse it, instead of mapping new pages in every pass.
_BLOCK = 1 << 14


class Filters(NamedTuple):
    """Settings of the last steps of a sampling chain. Temperature 0 means greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


# The filters in chain order. Each filter maps to its field in `Filters` and the name of the filter's own
# attribute that holds the value.
_SETTINGS: dict[type[LogitsProcessor], tuple[str, str]] = {
    Temperature: ("temperature", "temperature"),
    TopK: ("top_k", "k"),
    TopP: ("top_p", "mass"),
    MinP: ("min_p", "share"),
}


def split_filters(
    processors: Sequence[LogitsProcessor],
) -> tuple[Sequence[LogitsProcessor], Filters | None]:
    """Separate the temperature and filters of a sampling chain from the processors before them.

    The filters are None if the chain has no temperature, or if other processors follow it. Subclasses of the
    known filters count as other processors, because they could behave differently.
    """
    kinds = [type(processor) for processor in processors]
    if Temperature not in kinds:
        return processors, None
    begin = kinds.index(Temperature)
    if kinds[begin:] != [kind for kind in _SETTINGS if kind in kinds]:
        return processors, None
    settings: dict[str, Any] = {}
    for kind, processor in zip(kinds[begin:], processors[begin:], strict=True):
        name, own_name = _SETTINGS[kind]
        settings[name] = getattr(processor, own_name)
    return processors[:begin], Filters(**settings)


def choose_token(found: Candidates, filters: Filters, noise: Noise) -> int | None:
    """Return the token that the filters and noise choose, or None if the caller must apply the filters.

    Args:
        found: The candidates, including every token that the filters might keep.
        filters: The temperature, which is above 0, and the filters.
        noise: The Gumbel noise to add to the log-probabilities.
    """
    if not 0 < len(found[0]) <= _MAX_CANDIDATES:
        return None
    return _choose(found, filters, noise, None)


def choose_from_row(
    row: NDArray[np.float32], top: Callable[[int], Candidates], filters: Filters, noise: Noise
) -> tuple[int, float] | None:
    """Return the token chosen from a row, or None if the caller must apply the filters.

    Without top-k, any token in the vocabulary might be chosen. With top-k, the result is always None.

    Args:
        row: The logits of the whole vocabulary.
        top: Function that returns at least the given number of most likely tokens, including ties.
        filters: The temperature, which is above 0, and the filters.
        noise: The Gumbel noise to add to the log-probabilities.

    Returns:
        The token, and the largest logit of the row.
    """
    if filters.top_k or len(row) < _MIN_VOCABULARY:
        return None
    peak = float(row.max())
    token = None
    if not math.isfinite(peak):
        return None
    if filters.top_p < 1:
        total = _total_weight(row, peak, filters.temperature)
        for size in _NUCLEUS_SIZES:
            found = top(size)
            if len(found[0]) <= _MAX_CANDIDATES:
                token = _choose(found, filters, noise, total)
            if token is not None:
                break
    elif not filters.min_p:
        token = _choose_unfiltered(row, peak, top(_NUCLEUS_SIZES[0]), filters.temperature, noise)
    return None if token is None else (token, peak)


def _choose(found: Candidates, filters: Filters, noise: Noise, total: float | None) -> int | None:
    """Choose a token. `total` is the approximate weight of all tokens if `found` lacks some of them."""
    tokens, logits = found
    # A stable sort puts the lowest id first among equal logits.
    order = (-logits).argsort(kind="stable")
    # NaN is sorted last. The filters report it as an error.
    if not math.isfinite(logits[order[0]]) or math.isnan(logits[order[-1]]):
        return None
    if filters.top_k:
        # Include the first token that top-k discards, to detect whether rounding could affect the cut-off.
        order = order[: filters.top_k + 1]
    scaled = _scaled(logits[order], filters.temperature)
    log_probs = scaled.tolist()
    count = len(log_probs)
    if 0 < filters.top_k < count:
        count = filters.top_k
        if not _are_apart(log_probs, count):
            return None
    if filters.top_p < 1:
        sums = np.exp(scaled[:count]).cumsum().tolist()
        tolerance = _SUM_TOLERANCE if total is None else _FLOAT32_SUM_TOLERANCE
        size = _nucleus_size(sums, filters.top_p, sums[-1] if total is None else total, tolerance)
        if size is None or (size < count and not _are_apart(log_probs, size)):
            return None
        if size == count and total is not None:
            return None  # The first token that top-p discards is not among those found.
        count = size
    if filters.min_p > 0:
        # The filter compares exactly these log-probabilities. Binary search works because they are in
        # descending order.
        floor = math.log(filters.min_p)
        count = bisect_left(log_probs, True, 0, count, key=lambda log_prob: log_prob < floor)
    ids = tokens[order[:count]]
    if count == 1:
        return int(ids[0])
    scores = (scaled[:count] + gumbel(noise.seed, Stream.TOKEN, noise.position, ids)).tolist()
    best = max(scores)
    equal: list[int] = [token for token, score in zip(ids.tolist(), scores, strict=True) if score == best]
    return min(equal)


def _scaled(ranked: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Return the log-probabilities for descending logits, up to an additive constant."""
    spread = (float(ranked[0]) - float(ranked[-1])) / temperature
    # Enter `errstate` only if needed, because it can take as long as the rest of the function.
    with np.errstate(over="ignore") if spread == math.inf else nullcontext():
        log_probs: NDArray[np.float64] = (ranked - ranked[0]) / temperature
    return log_probs


def _nucleus_size(sums: list[float], mass: float, total: float, tolerance: float) -> int | None:
    """Return how many tokens top-p keeps, or None if rounding could change the number.

    Args:
        sums: Cumulative weights of the most likely tokens.
        mass: The top-p setting, below 1.
        total: Weight of all tokens.
        tolerance: Largest relative error of `sums` and `total`.
    """
    wanted, slack = mass * total, tolerance * total
    last = bisect_left(sums, wanted)
    if last == len(sums) or not sums[last] > wanted + slack:
        return None
    if last and not sums[last - 1] < wanted - slack:
        return None
    return last + 1


def _are_apart(log_probs: list[float], size: int) -> bool:
    """Return whether rounding cannot swap any of the first `size` tokens with a later one."""
    return log_probs[size] < log_probs[size - 1] - _SAME_LOG_PROB


def _total_weight(row: NDArray[np.float32], peak: float, temperature: float) -> float:
    """Return the sum of exp((logit - peak) / temperature), to within `_FLOAT32_SUM_TOLERANCE`.

    The sum is NaN or infinite if single precision does not suffice.
    """
    scratch = np.empty(min(_BLOCK, len(row)), np.float32)
    total = 0.0
    with np.errstate(all="ignore"):
        offset, scale = np.float32(peak), np.float32(1 / np.float64(temperature))
        for start in range(0, len(row), _BLOCK):
            block = scratch[: min(_BLOCK, len(row) - start)]
            np.subtract(row[start : start + _BLOCK], offset, out=block)
            block *= scale
            total += float(np.exp(block, out=block).sum())
    return total


def _choose_unfiltered(
    row: NDArray[np.float32], peak: float, found: Candidates, temperature: float, noise: Noise
) -> int | None:
    """Choose among all tokens, computing noise only for tokens that could have the largest score."""

    def scores(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            log_probs = (row[tokens].astype(np.float64) - peak) / temperature
        return log_probs + gumbel(noise.seed, Stream.TOKEN, noise.position, tokens)

    likely, logits = found
    # The smallest of these logits is an upper bound for the logits of all other tokens.
    next_log_prob = (float(logits.min()) - peak) / temperature
    floor = float(scores(likely).max()) - next_log_prob - _SUM_TOLERANCE
    if not math.isfinite(floor):
        return None
    lucky = tokens_with_noise_above(noise.seed, Stream.TOKEN, noise.position, len(row), floor)
    tokens = np.union1d(likely, lucky)
    return int(tokens[scores(tokens).argmax()])
