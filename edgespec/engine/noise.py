"""Counter-based noise: a pure function of (seed, stream, position, token id).

No generator holds state, so drafting, accepting, rolling back and starting again can never shift one
another's randomness. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"), applied once for each word of the counter.
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
    """Disjoint sources of randomness. The first is the only one invariant mode knows."""

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
    """The 64 bits that all noise of a stream at a position is derived from."""
    return _mix(_mix(_mix(seed & _MASK) ^ int(stream)) ^ position)


def uniform(seed: int, stream: Stream, position: int, index: int = 0) -> float:
    """One number in (0, 1): draw `index` of a stream at an absolute position."""
    # 52 bits and a half are exact in a double: with one bit more the largest would round up to 1.
    return ((_mix(key(seed, stream, position) ^ index) >> 12) + 0.5) * 2.0**-52


def gumbel(seed: int, stream: Stream, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for `tokens` (int64 [n]) at an absolute position: float64 [n].

    argmax(log p + gumbel) is a sample of p (the Gumbel-max trick).
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
