"""Share, remove, export and import the KV cells and recurrent states of llama.cpp sequences.

Exported cells can be moved to other positions, and those of a split model's two parts can be merged.
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

import ctypes
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import library
from edgespec.errors import BackendError, CapabilityError, ContextFullError

__all__ = ["KvSequences", "export_text", "first_part", "import_text", "merge_kv", "sized_parts"]

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_SIZE = struct.Struct("<Q")
# Exported fields of a `WideImage`: its start, tokens and positions.
_IMAGE = struct.Struct("<III")
Bytes: TypeAlias = NDArray[np.uint8]

_HEADER_BYTES = 8
_COUNT = struct.Struct("=I")
# Headers of a layer's keys or values. The first contains the data type and bytes per row. The second is used
# for transposed values, and contains the data type, bytes per element and row length.
_ROWS, _TRANSPOSED = struct.Struct("=iQ"), struct.Struct("=iII")
# Number of integers per exported KV cell: its position, its number of sequences (always 1) and its sequence
# id.
_CELL_FIELDS = 3


class WideImage(NamedTuple):
    """An image that takes up fewer llama.cpp positions than tokens.

    Attributes:
        start: Index of the first token.
        tokens: Number of tokens.
        position: The llama.cpp position that all of its tokens share.
        positions: Number of positions that the image takes up.
    """

    start: int
    tokens: int
    position: int
    positions: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


class KvSequences:
    """The llama.cpp sequences of one reply. Base class of `LlamaContext` and `ContextSlot`.

    Sequence 0 holds the committed tokens. The last sequence is scratch space for copying KV cells, and the
    others hold checkpoints or branches of the draft tree.

    Args:
        count: The number of llama.cpp sequences.
        window: The size of the sliding attention window in tokens, or 0 if all layers use full attention.
        first: The llama.cpp id of sequence 0. The ids of the others follow it.
        lock: A lock to hold during each call to llama.cpp, if other threads use the same llama_context.
    """

    def __init__(
        self,
        count: int,
        *,
        window: int,
        first: int = 0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._lib = library()
        self._first, self._lock = first, lock or nullcontext()
        self._context: Any = None
        self._memory: Any = None
        self._scratch = count - 1
        # The ids of all llama.cpp sequences other than 0 that may contain KV cells.
        self._others: set[int] = set()
        self.window = window
        # Whether images take up fewer llama.cpp positions than tokens (M-RoPE).
        self.has_wide_images = False
        # The images in sequence 0 that take up fewer positions than tokens.
        self._images: list[WideImage] = []

    def add_image(self, start: int, tokens: int, positions: int) -> None:
        """Record that `tokens` tokens, starting at `start`, take up only `positions` positions."""
        self._images.append(WideImage(start, tokens, self.position(start), positions))

    def forget_images(self, length: int) -> None:
        """Discard the records of images after the first `length` tokens."""
        while self._images and self._images[-1].end > length:
            self._images.pop()

    def position(self, index: int) -> int:
        """Return the llama.cpp position of the token with this index in sequence 0.

        Position and index are equal unless images before the token take up fewer positions than tokens. All
        tokens of such an image have the same position.
        """
        for image in reversed(self._images):
            if index >= image.end:
                return index - image.end + image.position + image.positions
            if index >= image.start:
                return image.position
        return index

    def attach(self, context: Any) -> None:
        """Attach a new llama_context with empty sequences."""
        self._context, self._memory = context, self._lib.llama_get_memory(context)

    def detach(self) -> Any:
        """Detach the llama_context before it is freed, and return it."""
        context, self._context, self._memory = self._context, None, None
        self._others.clear()
        return context

    @property
    def handle(self) -> Any:
        """The llama_context, or None if `is_lost` is True."""
        return self._context

    @property
    def is_lost(self) -> bool:
        """Whether the context has no KV cache, because `allocate` failed or `release` was called."""
        return not self._context

    def _check_allocated(self) -> None:
        if self.is_lost:
            raise ContextFullError(
                "the context has no KV cache because the system ran out of memory",
                "close other programs and send the message again",
                code="out_of_memory",
            )

    @property
    def has_memory(self) -> bool:
        """Whether the model has a KV cache or a recurrent state. Models with neither cannot generate text."""
        return bool(self._memory)

    def copy(self, source: int, sequence: int, start: int = -1, end: int = -1) -> None:
        """Make `sequence` share the KV cells of `source` at positions [start, end).

        By default, all cells are shared. A recurrent state is always shared as a whole.
        """
        self._others.add(sequence)
        with self._lock:
            self._lib.llama_memory_seq_cp(
                self._memory,
                self._first + source,
                self._first + sequence,
                self.position(start),
                self.position(end),
            )

    def drop(self, sequence: int, start: int, end: int = -1) -> bool:
        """Remove positions [start, end) from a sequence. By default, remove from `start` to the end.

        Returns:
            Whether the positions were removed. llama.cpp cannot always remove positions from a recurrent
            state.
        """
        with self._lock:
            dropped = bool(
                self._lib.llama_memory_seq_rm(
                    self._memory, self._first + sequence, self.position(start), self.position(end)
                )
            )
        if (start, end) == (0, -1):
            self._others.discard(sequence)
        return dropped

    def drop_others(self) -> None:
        """Remove all llama.cpp sequences except sequence 0."""
        for sequence in self._others - {0}:
            self.drop(sequence, 0)

    @property
    def first_position(self) -> int | None:
        """The lowest position in sequence 0, or None if it is empty."""
        with self._lock:
            position = int(self._lib.llama_memory_seq_pos_min(self._memory, self._first))
        return None if position < 0 else position

    @property
    def can_shift(self) -> bool:
        """Whether llama.cpp can move cached keys to other positions."""
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def remove_range(self, start: int, end: int) -> None:
        """Remove positions [start, end) from sequence 0, and shift all later tokens to close the gap."""
        with self._lock:
            self._lib.llama_memory_seq_rm(self._memory, self._first, start, end)
            self._lib.llama_memory_seq_add(self._memory, self._first, end, -1, start - end)

    def clear(self) -> None:
        """Remove the tokens of all sequences from the KV cache."""
        for sequence in range(self._scratch + 1):
            self.drop(sequence, 0)

    def compact_branch(self, source: int, start: int, end: int) -> None:
        """Append positions [start, end) of sequence `source` after the first `start` tokens of sequence 0.

        All other sequences are removed. The KV cells become contiguous, so attention sums round the same way
        as without drafting.
        """
        parts = self.export_cells(source, start, end)
        for sequence in range(self._scratch + 1):
            self.drop(sequence, 0 if sequence else start)
        if not self.import_cells(parts, start, end):
            raise BackendError(
                f"llama.cpp cannot move the KV cells of {end - start} accepted tokens",
                "omit --draft-branches for this model",
            )

    def export_cells(self, source: int, start: int, end: int) -> list[memoryview]:
        """Return a copy of a sequence's KV cells at positions [start, end), in parts for `import_cells`.

        Each part contains at most one attention window of tokens, because llama.cpp cannot export more at
        once.
        """
        parts = []
        # Remove KV cells that an interrupted export may have left in the scratch sequence.
        self.drop(self._scratch, 0)
        for begin, stop in self._parts(start, end):
            self.copy(source, self._scratch, begin, stop)
            parts.append(self.export_sequence(self._scratch))
            self.drop(self._scratch, 0)
        return parts

    def import_cells(self, parts: Sequence[bytes | memoryview], start: int, end: int) -> bool:
        """Append exported KV cells to sequence 0 at positions [start, end). Return whether it succeeded."""
        ranges = self._parts(start, end)
        if len(parts) != len(ranges):
            return False
        for part, (begin, stop) in zip(parts, ranges, strict=True):
            if not self.import_sequence(part, self._scratch):
                return False
            self.copy(self._scratch, 0, begin, stop)
            self.drop(self._scratch, 0)
        return True

    def repeat_cells(self, count: int, end: int) -> bool:
        """Append unchanged copies of the first `count` KV cells of sequence 0, up to position `end`.

        Returns:
            Whether all copies were appended. If not, some may have been.
        """
        # Export once, because llama.cpp would later omit cells that have left the sliding attention window.
        parts = self.export_cells(0, 0, count)
        for start in range(count, end, count):
            is_moved = len(parts) == 1 and _move_cells(parts[0], count)
            if not (is_moved and self.import_sequence(parts[0], self._scratch)):
                return False
            self.copy(self._scratch, 0, start, min(start + count, end))
            self.drop(self._scratch, 0)
        return True

    def export_images(self, start: int, end: int) -> list[bytes]:
        """Return one part that describes the images at [start, end), or [] unless `has_wide_images`."""
        if not self.has_wide_images:
            return []
        images = [image for image in self._images if start <= image.start < end]
        return [b"".join(_IMAGE.pack(each.start, each.tokens, each.positions) for each in images)]

    def import_images(self, parts: list[memoryview], start: int, end: int) -> list[memoryview]:
        """Record the images described by `export_images`, and return the remaining parts."""
        if not self.has_wide_images or not parts:
            return parts
        images, *parts = parts
        if len(images) % _IMAGE.size:
            return []
        for first, tokens, positions in _IMAGE.iter_unpack(images):
            if start <= first <= first + tokens <= end and 0 < positions <= tokens:
                self.add_image(first, tokens, positions)
        return parts

    def _parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split positions [start, end) at multiples of the sliding attention window."""
        window = self.window or max(1, end)
        cuts = [start, *range((start // window + 1) * window, end, window), end]
        return list(pairwise(cuts)) if start < end else []

    def state_bytes(self, *, recurrent_only: bool = False) -> int:
        """Return the export size of sequence 0 in bytes. See `export_sequence`."""
        flags = self._flags(recurrent_only)
        with self._lock:
            return int(self._lib.llama_state_seq_get_size_ext(self._context, self._first, flags))

    @property
    def total_state_bytes(self) -> int:
        """The size in bytes of an export of all sequences."""
        return int(self._lib.llama_state_get_size(self._context))

    def export_sequence(self, sequence: int = 0, *, recurrent_only: bool = False) -> memoryview:
        """Return a copy of a sequence's KV cells and recurrent state.

        KV cells outside the sliding attention window are omitted, because later tokens do not depend on them.
        """
        self._check_allocated()
        flags = self._flags(recurrent_only)
        native_id = self._first + sequence
        with self._lock:
            size = self._lib.llama_state_seq_get_size_ext(self._context, native_id, flags)
            copy = np.empty(size, np.uint8)
            written = self._lib.llama_state_seq_get_data_ext(
                self._context, copy.ctypes.data_as(_BYTES), size, native_id, flags
            )
        return copy.data[:written]

    def import_sequence(
        self, data: bytes | memoryview, sequence: int = 0, *, recurrent_only: bool = False
    ) -> bool:
        """Load the result of `export_sequence` into an empty sequence, and return whether this succeeded."""
        self._check_allocated()
        self._others.add(sequence)
        exported = np.frombuffer(data, np.uint8)
        with self._lock:
            return bool(
                self._lib.llama_state_seq_set_data_ext(
                    self._context,
                    exported.ctypes.data_as(_BYTES),
                    exported.size,
                    self._first + sequence,
                    self._flags(recurrent_only),
                )
            )

    def _flags(self, recurrent_only: bool) -> int:
        return int(self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if recurrent_only else 0


def export_text(context: KvSequences, start: int, end: int, *, recurrent: bool = False) -> bytes:
    """Return a copy of sequence 0 at positions [start, end), or of the whole sequence if it is recurrent."""
    parts = [context.export_sequence()] if recurrent else context.export_cells(0, start, end)
    return b"".join(sized_parts([*context.export_images(start, end), *parts]))


def import_text(
    context: KvSequences, data: memoryview, start: int, end: int, *, recurrent: bool = False
) -> bool:
    """Append the result of `export_text` to sequence 0, and return whether it was compatible."""
    parts = []
    while data:
        part, data = first_part(data)
        parts.append(part)
    parts = context.import_images(parts, start, end)
    if recurrent:
        return len(parts) == 1 and context.import_sequence(parts[0])
    return context.import_cells(parts, start, end)


def sized_parts(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of a snapshot, each preceded by its size in bytes. Join the result to store it."""
    return [piece for part in parts for piece in (_SIZE.pack(len(part)), part)]


def first_part(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return the first part of data joined from `sized_parts`, and the remaining data."""
    end = _SIZE.size + int.from_bytes(data[: _SIZE.size], "little")
    return data[_SIZE.size : end], data[end:]


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
        The KV cells, in the format in which the unsplit model would export them.

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


def _move_cells(part: memoryview, by: int) -> bool:
    """Add `by` to the positions of exported KV cells, in place. Their keys are not rotated.

    Returns:
        Whether the format was recognised. If not, the data is unchanged.
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
