"""Compute the 64-bit FNV-1a hash with NumPy. llama.cpp's weight cache uses it for file names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["fnv1a"]

_START, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MODULUS = 1 << 64
# Lowest byte of the prime, which is all that is needed to compute the lowest byte of each hash.
_LOW_PRIME = np.uint8(_PRIME & 0xFF)
# A block is split into `_LANES` lanes of `_STEPS` consecutive bytes. NumPy processes one byte of every lane
# at once.
_STEPS, _LANES = 64, 8192
_BLOCK_BYTES = _STEPS * _LANES

_Bytes = NDArray[np.uint8]


def fnv1a(file: BinaryIO, goes_on: Callable[[], bool]) -> int | None:
    """Return the FNV-1a hash of a file, or None if `goes_on` returns False.

    Processes about 60 MB per second. FNV-1a updates the hash h to (h ^ byte) * prime. The XOR changes only
    the lowest byte of h, so the lowest bytes of all intermediate hashes are computed first. The final hash is
    then a sum of products.

    Args:
        file: The file, which is read from its current position.
        goes_on: Called before each block is hashed. Returning False cancels the computation.

    Raises:
        OSError: The file cannot be read.
    """
    value = _START
    while block := file.read(_BLOCK_BYTES):
        if not goes_on():
            return None
        if len(block) < _BLOCK_BYTES:
            for byte in block:
                value = (value ^ byte) * _PRIME % _MODULUS
        else:
            value = _next(value, np.frombuffer(block, dtype=np.uint8))
    return value


def _next(value: int, block: _Bytes) -> int:
    """Return the hash `value` updated with another block."""
    # Row i holds byte i of each lane.
    given = np.ascontiguousarray(block.reshape(_LANES, _STEPS).T)
    mixed = _mixed_low_bytes(value & 0xFF, given)
    # `mixed` holds the lowest byte of the hash after the XOR with each byte, and `mixed ^ given` the lowest
    # byte before it.
    added = mixed.astype(np.int64) - (mixed ^ given)
    total = int(np.einsum("ij,ij->", added.view(np.uint64), _powers()))
    return (total + value * pow(_PRIME, _BLOCK_BYTES, _MODULUS)) % _MODULUS


def _mixed_low_bytes(low: int, given: _Bytes) -> _Bytes:
    """Return the lowest byte of the hash after the XOR with each byte, computed one bit at a time.

    Multiplying by the prime either keeps or flips each bit, depending only on lower bits. Each bit of the
    hash is therefore the XOR of all flips so far.
    """
    mixed = np.zeros_like(given)
    for place in range(8):
        bit = np.uint8(1 << place)
        own = given & bit
        changes = (mixed * _LOW_PRIME & bit) ^ own
        for step in range(1, _STEPS):
            changes[step] ^= changes[step - 1]
        first = np.uint8(low) & bit
        lanes = np.bitwise_xor.accumulate(np.concatenate(([first], changes[-1, :-1])))
        mixed[0] |= lanes ^ own[0]
        mixed[1:] |= changes[:-1] ^ lanes ^ own[1:]
    return mixed


@cache
def _powers() -> NDArray[np.uint64]:
    """Return the power of the prime that multiplies each byte's contribution to the hash."""
    powers = [_PRIME]
    for _ in range(_BLOCK_BYTES - 1):
        powers.append(powers[-1] * _PRIME % _MODULUS)
    return np.ascontiguousarray(np.array(powers[::-1], dtype=np.uint64).reshape(_LANES, _STEPS).T)
