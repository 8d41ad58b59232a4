"""The cells of a model in two halves, as the bytes that the whole model's would be.

llama.cpp writes what a sequence has_memory (llama_kv_cache::state_write) as a mark of its own and the
sequence; then the number of streams, which is 1 here, and of cells; the position and the sequence of each
cell; whether values lie transposed; the number of layers; the keys of each layer, and then the values of
each. Where some layers have a sliding window all but the mark comes twice: for those without one, then for
those with one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError

__all__ = ["merge_kv"]

Bytes: TypeAlias = NDArray[np.uint8]

_MARK_BYTES = 8
_COUNT = struct.Struct("=I")
# The type; of a row: bytes. Transposed: bytes of an element, elements of a row.
_ROWS, _TRANSPOSED = struct.Struct("=iQ"), struct.Struct("=iII")
# Position, how many sequences, which.
_CELL = 3


@dataclass(frozen=True, slots=True)
class _Layer:
    """Keys or values of a layer: what is said of them, and themselves, uint8 [..., cells, bytes]."""

    about: memoryview
    cells: Bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """What layers of one kind remember. cells: int32 [n, 3]."""

    cells: NDArray[np.int32]
    transposed: int
    keys: Sequence[_Layer]
    values: Sequence[_Layer]

    def in_order(self) -> _Memory:
        """The same with its cells in order of their positions."""
        order = np.argsort(self.cells[:, 0])

        def ordered(layers: Sequence[_Layer]) -> list[_Layer]:
            return [_Layer(layer.about, layer.cells[..., order, :]) for layer in layers]

        return _Memory(self.cells[order], self.transposed, ordered(self.keys), ordered(self.values))


def merge_kv(
    lower: Sequence[memoryview], upper: Sequence[memoryview], name: str
) -> Sequence[bytes | memoryview]:
    """Merge the exported cells of both splits into those of the whole model.

    Raises CapabilityError where the bytes are not laid out as described, or are not of the same cells.
    """
    try:
        return [_join(*both) for both in zip(lower, upper, strict=True)]
    except ValueError as error:
        raise CapabilityError(
            f"the halves of {name} cannot lend their memory to one copy: llama.cpp lays it out otherwise"
            f" ({error})",
            "load the model's own file for lowbit, or choose another method",
        ) from error


def _join(lower: memoryview, upper: memoryview) -> bytes:
    if lower[:_MARK_BYTES] != upper[:_MARK_BYTES]:
        raise ValueError("they begin with other marks")
    pieces: list[bytes | memoryview] = [lower[:_MARK_BYTES]]
    for below, above in zip(_memories(lower), _memories(upper), strict=True):
        if not np.array_equal(below.cells, above.cells):
            # Each context fills cells that were freed in an order of its own.
            below, above = below.in_order(), above.in_order()
        if not np.array_equal(below.cells, above.cells) or below.transposed != above.transposed:
            raise ValueError("they hold other cells")
        pieces += [_COUNT.pack(1), _COUNT.pack(len(below.cells)), below.cells.tobytes()]
        pieces += [_COUNT.pack(below.transposed), _COUNT.pack(len(below.keys) + len(above.keys))]
        for layer in (*below.keys, *above.keys, *below.values, *above.values):
            pieces += [layer.about, layer.cells.tobytes()]
    return b"".join(pieces)


def _memories(data: memoryview) -> list[_Memory]:
    reader = _Reader(data[_MARK_BYTES:])
    memories = [reader.memory()]
    while not reader.at_end:
        memories.append(reader.memory())
    return memories


class _Reader:
    """Reads such bytes from the beginning. Raises ValueError where they are others."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def memory(self) -> _Memory:
        if self._count() != 1:
            raise ValueError("more than one stream")
        count = self._count()
        cells = self._bytes(count, 4 * _CELL).view(np.int32).reshape(count, _CELL)
        if not count or (cells[:, 1:] != (1, cells[0, 2])).any():
            raise ValueError("more than the cells of a sequence")
        transposed, layers = self._count(), self._count()
        if transposed > 1:
            raise ValueError("more about cells than their position")
        keys = [self._layer(count) for _ in range(layers)]
        read = self._transposed if transposed else self._layer
        return _Memory(cells, transposed, keys, [read(count) for _ in range(layers)])

    def _count(self) -> int:
        return int(_COUNT.unpack(self._take(_COUNT.size))[0])

    def _layer(self, count: int) -> _Layer:
        about = self._take(_ROWS.size)
        return _Layer(about, self._bytes(count, _ROWS.unpack(about)[1]))

    def _transposed(self, count: int) -> _Layer:
        about = self._take(_TRANSPOSED.size)
        _, size, elements = _TRANSPOSED.unpack(about)
        return _Layer(about, self._bytes(elements, count * size).reshape(elements, count, size))

    def _bytes(self, *shape: int) -> Bytes:
        return np.frombuffer(self._take(int(np.prod(shape, dtype=object))), np.uint8).reshape(shape)

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError("it ends too early")
        self._at += size
        return self._data[self._at - size : self._at]
