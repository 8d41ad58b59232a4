"""Random numbers that are a pure function of (seed, stream, position, token id).

Discarding drafted tokens therefore never changes a random number. The hash function is the finaliser of
SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stream", "gumbel", "key", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U_GOLDEN, _U_M1, _U_M2 = np.uint64(_GOLDEN), np.uint64(_M1), np.uint64(_M2)
_U12, _U27, _U30, _U31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)


class Stream(IntEnum):
    """Independent streams of random numbers. Drafting and acceptance use different streams."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _M1) & _MASK
    word = ((word ^ (word >> 27)) * _M2) & _MASK
    return word ^ (word >> 31)


def key(seed: int, stream: Stream, position: int) -> int:
    """Return a 64-bit hash of the seed, stream and position."""
    return _mix(_mix(_mix(seed & _MASK) ^ int(stream)) ^ position)


def uniform(seed: int, stream: Stream, position: int, index: int = 0) -> float:
    """Return a random number between 0 and 1, determined by the seed, stream, position and index."""
    # Use only 52 bits, because a longer fraction could round up to 1.
    return ((_mix(key(seed, stream, position) ^ index) >> 12) + 0.5) * 2.0**-52


def gumbel(seed: int, stream: Stream, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return standard Gumbel noise for each of `tokens` (int64 [n]) at a position, as float64 [n].

    The token with the largest log p + noise is a sample from p (the Gumbel-max trick).
    """
    words = tokens.astype(np.uint64)
    words ^= np.uint64(key(seed, stream, position))
    words += _U_GOLDEN
    words ^= words >> _U30
    words *= _U_M1
    words ^= words >> _U27
    words *= _U_M2
    words ^= words >> _U31
    unit = ((words >> _U12).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(unit))
    return noise
