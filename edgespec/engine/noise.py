"""Random numbers that are a pure function of (seed, stream, position, token id).

Discarding drafted tokens therefore never changes a random number. The hash function is the finaliser of
SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Noise", "Stream", "gumbel", "key", "tokens_with_noise_above", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U_GOLDEN, _U_M1, _U_M2 = np.uint64(_GOLDEN), np.uint64(_M1), np.uint64(_M2)
_U12, _U27, _U30, _U31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
# Hash up to this many tokens in pure Python, which avoids NumPy's overhead for small arrays.
_FEW_TOKENS = 8
# Tokens per block when searching the noise of a whole vocabulary. A block fits into a core's cache, and a
# power of two allows computing the token ids by XOR.
_BLOCK = 1 << 14


class Stream(IntEnum):
    """Independent random number streams. Drafting and acceptance use different ones."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


class Noise(NamedTuple):
    """Seed and position that determine the Gumbel noise for sampling one token. See `gumbel`."""

    seed: int
    position: int


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _M1) & _MASK
    word = ((word ^ (word >> 27)) * _M2) & _MASK
    return word ^ (word >> 31)


def key(seed: int, stream: Stream, position: int) -> int:
    """Return a 64-bit hash of the seed, stream and position."""
    return _mix(_stream_key(seed, stream) ^ position)


@lru_cache(maxsize=64)
def _stream_key(seed: int, stream: int) -> int:
    return _mix(_mix(seed & _MASK) ^ stream)


def uniform(seed: int, stream: Stream, position: int, index: int = 0) -> float:
    """Return a random number between 0 and 1, determined by the seed, stream, position and index."""
    # Use only 52 bits, because a longer fraction could round up to 1.
    return ((_mix(key(seed, stream, position) ^ index) >> 12) + 0.5) * 2.0**-52


def gumbel(seed: int, stream: Stream, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return standard Gumbel noise for each of `tokens` (int64 [n]) at a position, as float64 [n].

    The token with the largest log p + noise is a sample from p (the Gumbel-max trick).
    """
    common = key(seed, stream, position)
    if tokens.size <= _FEW_TOKENS:
        bits = np.array([_mix(common ^ token) >> 12 for token in tokens.tolist()], np.float64)
    else:
        words = tokens.astype(np.uint64)
        words ^= np.uint64(common)
        _mix_array(words)
        words >>= _U12
        bits = words.astype(np.float64)
    bits += 0.5
    bits *= 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(bits))
    return noise


def tokens_with_noise_above(
    seed: int, stream: Stream, position: int, vocab_size: int, floor: float
) -> NDArray[np.int64]:
    """Return the ids of all tokens whose `gumbel` noise is at least `floor`, and perhaps a few more.

    Only the tokens' hashes are computed, which is faster than computing logarithms. The ids (int64 [n]) are
    in ascending order.
    """
    # The noise is at least `floor` if the uniform number is at least 1 - distance. The margins added below
    # far exceed any rounding errors.
    distance = -math.expm1(-math.exp(-max(floor, -5.0)))
    lowest = (1 << 52) - min(math.ceil(distance * (1 + 1e-9) * 2.0**52) + 2, 1 << 52)
    limit = np.uint64(lowest << 12)
    common = key(seed, stream, position)
    ids = np.arange(min(_BLOCK, vocab_size), dtype=np.uint64)
    words, scratch = np.empty_like(ids), np.empty_like(ids)
    found = []
    for start in range(0, vocab_size, _BLOCK):
        size = min(_BLOCK, vocab_size - start)
        block = words[:size]
        np.bitwise_xor(ids[:size], np.uint64(common ^ start), out=block)
        _mix_array(block, scratch[:size])
        found.append(np.flatnonzero(block >= limit) + start)
    return np.concatenate(found)


def _mix_array(words: NDArray[np.uint64], scratch: NDArray[np.uint64] | None = None) -> None:
    """Apply `_mix` to 64-bit words in place. `scratch` is a temporary array of the same size."""
    words += _U_GOLDEN
    words ^= np.right_shift(words, _U30, out=scratch)
    words *= _U_M1
    words ^= np.right_shift(words, _U27, out=scratch)
    words *= _U_M2
    words ^= np.right_shift(words, _U31, out=scratch)
