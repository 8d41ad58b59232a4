"""Merges exported KV cells of a split model into the bytes that the whole model would export.

llama.cpp's format (llama_kv_cache::state_write) is:

1. an 8-byte header: a magic number and the sequence id;
2. the number of streams, always 1 here, and the number of cells;
3. the position and the sequence ids of each cell;
4. whether values are stored transposed, and the number of layers;
5. the keys of each layer, then the values of each layer.

For models with sliding-window layers, 2 to 5 follow twice: for the other layers, then for these.
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

_HEADER_BYTES = 8
_COUNT = struct.Struct("=I")
# Header of a layer: ggml_type and bytes per row; if transposed, ggml_type, bytes per element and elements per
# row.
_ROWS, _TRANSPOSED = struct.Struct("=iQ"), struct.Struct("=iII")
# Integers per cell: its position, the number of its sequences, and the id of its only sequence.
_CELL_FIELDS = 3


@dataclass(frozen=True, slots=True)
class _Layer:
    """The keys or values of a layer.

    Attributes:
        header: The layer's header as exported.
        cells: The data, uint8 [..., cells, bytes].
    """

    header: memoryview
    cells: Bytes


@dataclass(frozen=True, slots=True)
class _Memory:
    """The cache of all layers with the same attention window.

    Attributes:
        cells: int32 [cells, _CELL_FIELDS].
        transposed: 1 if values are stored transposed, else 0.
        keys: The keys of each layer.
        values: The values of each layer.
    """

    cells: NDArray[np.int32]
    transposed: int
    keys: Sequence[_Layer]
    values: Sequence[_Layer]

    def sorted_by_position(self) -> _Memory:
        """Return the same cache with its cells in order of position."""
        order = np.argsort(self.cells[:, 0])

        def ordered(layers: Sequence[_Layer]) -> list[_Layer]:
            return [_Layer(layer.header, layer.cells[..., order, :]) for layer in layers]

        return _Memory(self.cells[order], self.transposed, ordered(self.keys), ordered(self.values))


def merge_kv(
    lower: Sequence[memoryview], upper: Sequence[memoryview], name: str
) -> Sequence[bytes | memoryview]:
    """Merge the exported cells of both splits into those of the whole model.

    Args:
        lower: The parts that `LlamaContext.export_cells` returned for the lower split.
        upper: The parts of the upper split, for the same positions.
        name: The model's name, for the error message.

    Returns:
        The parts as the whole model would export them.

    Raises:
        CapabilityError: The parts have another format than expected, or hold different cells.
    """
    try:
        return [_join(*both) for both in zip(lower, upper, strict=True)]
    except ValueError as error:
        raise CapabilityError(
            f"the KV cells of {name}'s lower and upper split cannot be merged: {error}",
            "load the original model file for lowbit, or choose another method",
        ) from error


def _join(lower: memoryview, upper: memoryview) -> bytes:
    if lower[:_HEADER_BYTES] != upper[:_HEADER_BYTES]:
        raise ValueError("their headers differ")
    pieces: list[bytes | memoryview] = [lower[:_HEADER_BYTES]]
    for below, above in zip(_memories(lower), _memories(upper), strict=True):
        if not np.array_equal(below.cells, above.cells):
            # Each context reuses freed cells in its own order.
            below, above = below.sorted_by_position(), above.sorted_by_position()
        if not np.array_equal(below.cells, above.cells) or below.transposed != above.transposed:
            raise ValueError("they hold different cells")
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
    """Parses exported cells. Raises ValueError for bytes of another format."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def memory(self) -> _Memory:
        if self._count() != 1:
            raise ValueError("there is more than one stream")
        count = self._count()
        cells = self._bytes(count, 4 * _CELL_FIELDS).view(np.int32).reshape(count, _CELL_FIELDS)
        if not count or (cells[:, 1:] != (1, cells[0, 2])).any():
            raise ValueError("a cell belongs to several sequences")
        transposed, layers = self._count(), self._count()
        if transposed > 1:
            raise ValueError("the cells have an unknown layout")
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
            raise ValueError("the data ends too early")
        self._at += size
        return self._data[self._at - size : self._at]
