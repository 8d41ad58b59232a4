"""Read and change exported KV cells: merge those of a split model's two parts, and move cells.

llama.cpp exports cells in this format (llama_kv_cache::state_write):

1. an 8-byte header: a magic number and the sequence id;
2. the number of streams, which is always 1 here, and the number of cells;
3. the position and the sequence ids of each cell;
4. whether values are stored transposed, and the number of layers;
5. the keys of each layer, then the values of each layer.

If the model has sliding-window layers, items 2 to 5 occur twice: first for the other layers, then for the
sliding-window layers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError

__all__ = ["merge_kv", "move_cells"]

Bytes: TypeAlias = NDArray[np.uint8]

_HEADER_BYTES = 8
_COUNT = struct.Struct("=I")
# Headers before the keys or values of a layer. The first contains the data type and bytes per row. The
# second, for transposed values, contains the data type, bytes per element and row length.
_ROWS, _TRANSPOSED = struct.Struct("=iQ"), struct.Struct("=iII")
# Each exported KV cell has three integers: its position, its number of sequences (always 1) and its sequence
# id.
_CELL_FIELDS = 3


@dataclass(frozen=True, slots=True)
class _Layer:
    header: memoryview
    cells: Bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """The exported KV cells of all layers with the same attention window."""

    cells: NDArray[np.int32]
    transposed: int
    keys: Sequence[_Layer]
    values: Sequence[_Layer]

    def sorted_by_position(self) -> _Memory:
        order = np.argsort(self.cells[:, 0])

        def ordered(layers: Sequence[_Layer]) -> list[_Layer]:
            return [_Layer(layer.header, layer.cells[..., order, :]) for layer in layers]

        return _Memory(self.cells[order], self.transposed, ordered(self.keys), ordered(self.values))


def merge_kv(
    lower: Sequence[memoryview], upper: Sequence[memoryview], name: str
) -> Sequence[bytes | memoryview]:
    """Merge the exported KV cells of a split model's lower and upper layers.

    Returns:
        The KV cells in the form in which the unsplit model would export them.

    Raises:
        CapabilityError: The exported KV cells have an unexpected format, or contain different tokens.
    """
    try:
        return [_join(*both) for both in zip(lower, upper, strict=True)]
    except ValueError as error:
        raise CapabilityError(
            f"the KV cells of {name}'s lower and upper layers cannot be merged: {error}",
            "load the original model file to use lowbit, or choose another method",
            code="lowbit_not_supported",
        ) from error


def move_cells(part: memoryview, by: int) -> bool:
    """Add `by` to the positions of exported KV cells, in place. Their keys are not rotated.

    Returns:
        Whether the format is known. If not, nothing changes.
    """
    try:
        memories = _memories(part)
    except ValueError:
        return False
    for memory in memories:
        memory.cells[:, 0] += by
    return True


def _join(lower: memoryview, upper: memoryview) -> bytes:
    if lower[:_HEADER_BYTES] != upper[:_HEADER_BYTES]:
        raise ValueError("the KV caches of the lower and the upper layers have different formats")
    pieces: list[bytes | memoryview] = [lower[:_HEADER_BYTES]]
    for below, above in zip(_memories(lower), _memories(upper), strict=True):
        if not np.array_equal(below.cells, above.cells):
            # The lower and upper layers may have stored the same tokens in different orders, so sort both by
            # position.
            below, above = below.sorted_by_position(), above.sorted_by_position()
        if not np.array_equal(below.cells, above.cells) or below.transposed != above.transposed:
            raise ValueError("the KV caches of the lower and the upper layers contain different tokens")
        pieces += [_COUNT.pack(1), _COUNT.pack(len(below.cells)), below.cells.tobytes()]
        pieces += [_COUNT.pack(below.transposed), _COUNT.pack(len(below.keys) + len(above.keys))]
        for layer in (*below.keys, *above.keys, *below.values, *above.values):
            pieces += [layer.header, layer.cells.tobytes()]
    return b"".join(pieces)


def _memories(data: memoryview) -> list[_Memory]:
    reader = _Reader(data[_HEADER_BYTES:])
    memories = [reader.memory()]
    while not reader.at_end:
        memories.append(reader.memory())
    return memories


class _Reader:
    """Parser for exported KV cells. Its methods raise ValueError if the data has an unexpected format."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def memory(self) -> _Memory:
        if self._count() != 1:
            raise ValueError("the exported KV data has more than one stream")
        count = self._count()
        cells = self._bytes(count, 4 * _CELL_FIELDS).view(np.int32).reshape(count, _CELL_FIELDS)
        if not count or (cells[:, 1:] != (1, cells[0, 2])).any():
            raise ValueError("a KV cell belongs to several sequences")
        transposed, layers = self._count(), self._count()
        if transposed > 1:
            raise ValueError("the exported KV data has an unknown layout")
        keys = [self._layer(count) for _ in range(layers)]
        read = self._transposed if transposed else self._layer
        return _Memory(cells, transposed, keys, [read(count) for _ in range(layers)])

    def _count(self) -> int:
        return int(_COUNT.unpack(self._take(_COUNT.size))[0])

    def _layer(self, count: int) -> _Layer:
        header = self._take(_ROWS.size)
        return _Layer(header, self._bytes(count, _ROWS.unpack(header)[1]))

    def _transposed(self, count: int) -> _Layer:
        header = self._take(_TRANSPOSED.size)
        _, size, elements = _TRANSPOSED.unpack(header)
        return _Layer(header, self._bytes(elements, count * size).reshape(elements, count, size))

    def _bytes(self, *shape: int) -> Bytes:
        return np.frombuffer(self._take(int(np.prod(shape, dtype=object))), np.uint8).reshape(shape)

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError("the exported KV data is truncated")
        self._at += size
        return self._data[self._at - size : self._at]
