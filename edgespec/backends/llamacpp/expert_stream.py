"""Run a mixture-of-experts model that is larger than memory by reading experts as the router chooses them.

A token uses only a few of a layer's experts. An `ExpertStream` keeps all other weights in memory, and as many
experts as fit in the rest, those that were used most. When llama.cpp has computed which experts a pass uses
in a layer, the stream reads those of them that are not in memory, in place of the ones used least. The counts
are saved for each model, so that the next load starts with the experts that earlier replies used.

While a layer is computed, the stream reads experts of the next layer ahead. It finds out which by applying
the next layer's router to this layer's hidden states, and stops reading ahead where that is mostly wrong.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ggml
from edgespec.backends.llamacpp.weight_stream import (
    PAGE,
    POLL_SECONDS,
    FileRange,
    LayerRanges,
    WeightStream,
    advise,
    out_of_memory,
    saved_bytes,
    streamable_layers,
)
from edgespec.errors import BackendError, CancelledError, CapabilityError
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.formats.gguf_files import gguf_files, tensor_size
from edgespec.model.formats.gguf_header import GgufTensor, read_header
from edgespec.model.memory_estimate import ExpertReads
from edgespec.system.facts import Facts
from edgespec.system.files import file_state

__all__ = ["ExpertStream", "ExpertTable", "expert_table", "saved_uses"]

# Experts that are chosen by the router. Shared experts stay in memory, because every token uses them.
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|gate|down|gate_up)_exps\.weight")
_ROUTER, _NORMS = (
    "blk.{}.ffn_gate_inp.weight",
    ("blk.{}.ffn_norm.weight", "blk.{}.post_attention_norm.weight"),
)
_FLOAT32 = 0
# Smallest share of the experts' bytes that must be in pages of their own. Only toy models have experts that
# are so small that many of their pages hold several of them. Chosen.
_MIN_PAGES_SHARE = 0.75
# Number of tokens after which the counts of uses are halved, so that they follow what is being written. It
# was chosen to be a few replies.
_HALVED_AFTER_TOKENS = 4096
# Read ahead only while at least this share of the predicted experts is used. The value was chosen because
# reading an expert that is not used costs as much time as reading one that is used saves.
_MIN_RIGHT_SHARE = 0.5
# Weight of earlier predictions relative to those of the latest layer, in the share that was right. The value
# was chosen so that about 100 layers count.
_REMEMBERED = 0.99
# Widest pass, in tokens, for which experts are read ahead. The value was chosen because wider passes use most
# experts of every layer, and predicting which ones would take long.
_MAX_AHEAD_TOKENS = 16
_KIND = "experts"
_MADV_NOHUGEPAGE = 15


class _ExpertTensor(NamedTuple):
    """The tensor with one projection of all experts of a layer.

    Attributes:
        file: Index of the file that contains the tensor.
        offset: Offset of the first expert in the file, in bytes.
        stride_bytes: Size of an expert.
    """

    file: int
    offset: int
    stride_bytes: int

    def pages(self, expert: int) -> FileRange:
        """Return the pages that contain nothing but this expert. Its other pages stay in memory."""
        begin = self.offset + expert * self.stride_bytes
        first, end = -(-begin // PAGE) * PAGE, (begin + self.stride_bytes) // PAGE * PAGE
        return FileRange(self.file, first, max(0, end - first))


class _Router(NamedTuple):
    """Where the router's weights and those of the norm before it are, if both can be used to predict."""

    weight: FileRange
    norm: FileRange | None


@dataclass(frozen=True)
class ExpertTable:
    """The experts of a model that can be read one by one.

    Experts are numbered through all layers: expert `e` of the layer at index `i` in `layers` has the number
    `i * count + e`.

    Attributes:
        layers: Indices of the layers with experts.
        count: Number of experts in each of these layers.
        used: Number of experts that a token uses in each of these layers.
        tensors: The tensors with the experts of each layer.
        routers: The router of each layer, or None if it cannot be used to predict.
        steps: Number of layers that could be streamed as a whole. `LoadOptions.streamed_layers` counts in
            these steps how much of the experts does not stay in memory.
        key: Identifies the model's files.
    """

    layers: tuple[int, ...]
    count: int
    used: int
    tensors: tuple[tuple[_ExpertTensor, ...], ...]
    routers: tuple[_Router | None, ...]
    steps: int
    key: str

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of bytes to read for each expert."""
        numbers = range(len(self.layers) * self.count)
        return np.array([self.part(number).size_bytes for number in numbers], np.int64)

    @cached_property
    def all_bytes(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def largest_layer_bytes(self) -> int:
        return int(self.sizes.reshape(len(self.layers), -1).sum(axis=1).max())

    def part(self, number: int) -> LayerRanges:
        """Return where an expert is in the model's files."""
        layer, expert = divmod(number, self.count)
        pages = (tensor.pages(expert) for tensor in self.tensors[layer])
        return LayerRanges(
            self.layers[layer], self.layers[layer], tuple(each for each in pages if each.size_bytes)
        )

    def saved_bytes(self, options: LoadOptions) -> int:
        """Return how many bytes of memory streaming saves.

        All experts of one layer must fit, because a pass over a long prompt uses all of them.
        """
        most = self.all_bytes - self.largest_layer_bytes
        return most * min(options.streamed_layers, self.steps) // self.steps

    def pool_bytes(self, options: LoadOptions) -> int:
        """Return how many bytes of experts are in memory at a time."""
        return self.all_bytes - self.saved_bytes(options)

    def most_used(self, uses: NDArray[np.float64], limit_bytes: int) -> NDArray[np.int64]:
        """Return the numbers of the most used experts that fit in `limit_bytes`."""
        layers, experts = np.divmod(np.arange(uses.size), self.count)
        # Experts with equal counts are spread over all layers.
        order = np.lexsort((layers, experts, -uses))
        return order[np.cumsum(self.sizes[order]) <= limit_bytes]

    def reads(self, options: LoadOptions) -> ExpertReads:
        """Estimate what a pass reads from disk, from the saved counts of uses."""
        uses = saved_uses(self) + 1.0
        chances = uses.reshape(len(self.layers), -1)
        chances = (self.used * chances / chances.sum(axis=1, keepdims=True)).clip(max=1.0).ravel()
        # The experts that the current layer uses take the place of others.
        room_bytes = self.used * int(self.sizes.max())
        kept = self.most_used(uses, self.pool_bytes(options) - room_bytes)
        read = self.sizes * chances
        read[kept] = 0
        per_layer = read.reshape(len(self.layers), -1).sum(axis=1)
        return ExpertReads(
            self.all_bytes,
            int(self.sizes[kept].sum()),
            {layer: int(size) for layer, size in zip(self.layers, per_layer, strict=True)},
        )


def expert_table(path: Path, options: LoadOptions) -> ExpertTable | None:
    """Return the experts to stream, or None if the model is not streamed, or by whole layers.

    Raises:
        ModelFileError: A file cannot be read.
    """
    # Low-bit copies replace whole layers.
    if not options.streamed_layers or options.streamable is not None:
        return None
    files = tuple(gguf_files(path))
    return _expert_table(path, files, tuple(map(file_state, files)))


# Cached because planning needs the sizes often.
@lru_cache(maxsize=8)
def _expert_table(path: Path, files: tuple[Path, ...], states: tuple[str, ...]) -> ExpertTable | None:
    headers = [read_header(file) for file in files]
    # Only the first file of a multi-part model contains the metadata.
    first = headers[0]
    blocks = first.architecture_number("block_count") - first.architecture_number("nextn_predict_layers")
    found: dict[int, list[_ExpertTensor]] = {}
    small: dict[str, tuple[GgufTensor, FileRange]] = {}
    counts, tensor_bytes = set(), 0
    for number, header in enumerate(headers):
        for tensor in header.tensors:
            size_bytes, offset = tensor_size(tensor), header.size_bytes + tensor.offset_bytes
            match = _EXPERTS.fullmatch(tensor.name)
            if match is None:
                small[tensor.name] = tensor, FileRange(number, offset, size_bytes)
            elif int(match[1]) < blocks:
                if not size_bytes or len(tensor.shape) != 3:
                    return None
                counts.add(tensor.shape[2])
                tensor_bytes += size_bytes
                each = _ExpertTensor(number, offset, size_bytes // tensor.shape[2])
                found.setdefault(int(match[1]), []).append(each)
    layers, used = tuple(sorted(found)), first.architecture_number("expert_used_count")
    whole = streamable_layers(path)
    if len(layers) < 2 or len(counts) != 1 or not used or not whole:
        return None
    (count,) = counts
    tensors = tuple(tuple(found[layer]) for layer in layers)
    routers = tuple(_router(small, layer, count) for layer in layers)
    table = ExpertTable(layers, count, used, tensors, routers, len(whole), repr(states))
    most = table.all_bytes - table.largest_layer_bytes
    is_small = table.all_bytes < _MIN_PAGES_SHARE * tensor_bytes
    # A model whose weights are mostly in dense layers runs in less memory if whole layers are streamed.
    return None if is_small or most < saved_bytes(whole) else table


def _router(tensors: dict[str, tuple[GgufTensor, FileRange]], layer: int, count: int) -> _Router | None:
    weight, place = tensors.get(_ROUTER.format(layer), (None, None))
    if weight is None or place is None or weight.kind != _FLOAT32 or weight.shape[1:] != (count,):
        return None
    norms = (tensors[name.format(layer)] for name in _NORMS if name.format(layer) in tensors)
    usable = (norm for each, norm in norms if each.kind == _FLOAT32 and each.shape == weight.shape[:1])
    return _Router(place, next(usable, None))


def saved_uses(table: ExpertTable) -> NDArray[np.float64]:
    """Return how often each expert was used in earlier runs, or zeros if that is unknown."""
    uses = np.zeros(len(table.layers) * table.count)
    match Facts().get(_KIND, table.key):
        case list(saved) if len(saved) == uses.size and all(isinstance(each, int) for each in saved):
            uses[:] = saved
    return uses


class ExpertStream(WeightStream):
    """Reads the experts that passes use, unless they are in memory.

    Passes must run one at a time. Only the reader's thread reads and frees experts: an interrupt can end a
    pass at any point, but it does not reach that thread.

    Args:
        files: The model's files.
        mapped: The addresses at which llama.cpp has mapped them. See `file_mappings`.
        table: The experts. All other weights are read immediately.
        options: The options that the model is loaded with.
        progress: Called while reading. Returning False raises CancelledError.
        unloaded: Parts of the files that llama.cpp does not use, so they are not read at all.

    Attributes:
        layers: Indices of the layers with experts.
        bytes_per_pass: Estimated number of bytes that a pass over one token reads.
        saved_bytes: Number of bytes of memory that streaming saves.
        read_bytes: Number of bytes of experts that passes have read so far.
        ahead_bytes: The part of these bytes that was read ahead.

    Raises:
        BackendError: The files cannot be read, or there is not enough memory.
    """

    def __init__(
        self,
        files: Sequence[Path],
        mapped: Sequence[tuple[int, int, int, int]],
        table: ExpertTable,
        options: LoadOptions,
        progress: Progress | None = None,
        unloaded: Sequence[FileRange] = (),
    ) -> None:
        self._table, self._pool_bytes = table, table.pool_bytes(options)
        # Positions of layers in the table, by the names of the tensors with the experts that the router has
        # chosen, and with the hidden states from which the choice can be predicted.
        self._choices = {b"ffn_moe_topk-%d" % layer: each for each, layer in enumerate(table.layers)}
        self._inputs: dict[bytes, int] = {}
        self._uses, self._tokens = saved_uses(table), 0
        self._present = np.zeros(self._uses.size, np.bool_)
        self._present[table.most_used(self._uses, self._pool_bytes)] = True
        self._held_bytes = int(table.sizes[self._present].sum())
        # Maximum size of the experts in memory. It is smaller than planned while memory is low.
        self._limit_bytes = self._pool_bytes
        # The experts of the layer being computed, and those of the next one that are predicted and not yet
        # read.
        self._needed = self._ahead = np.empty(0, np.int64)
        # Numbers of requests of passes, and of the last one that the reader has answered.
        self._asked = self._answered = 0
        # Predicted experts of layers that the current pass has not reached, by the layer's position.
        self._predicted: dict[int, NDArray[np.int64]] = {}
        # Weighted numbers of predicted experts, and of those that were used.
        self._guesses = self._right_guesses = 0.0
        self._passed: set[int] = set()
        self._expected = 0
        self.read_bytes = self.ahead_bytes = 0
        super().__init__(files, mapped, [], progress, unloaded)
        self.layers = table.layers
        self.saved_bytes = table.saved_bytes(options)
        self.bytes_per_pass = sum(table.reads(options).layer_bytes.values())
        for layer, (position, router) in zip(table.layers, [*enumerate(table.routers)][1:], strict=False):
            if router is not None:
                self._inputs[b"ffn_inp-%d" % layer] = position

    def _ranges(self, numbers: Iterable[int]) -> list[FileRange]:
        return [each for number in numbers for each in self._table.part(int(number)).ranges]

    def _read_kept(self, progress: Progress | None, unloaded: Sequence[FileRange]) -> None:
        # Huge pages would hold parts of several experts, so freeing one of them would free no memory.
        for tensor in (each for layer in self._table.tensors for each in layer):
            pages = tensor._replace(stride_bytes=tensor.stride_bytes * self._table.count).pages(0)
            advise(self._address(pages), pages.size_bytes, _MADV_NOHUGEPAGE)
        absent = self._ranges(np.flatnonzero(~self._present))
        super()._read_kept(progress, [*unloaded, *absent])

    def _floats(self, part: FileRange) -> NDArray[np.float32]:
        values = (ctypes.c_float * (part.size_bytes // 4)).from_address(self._address(part))
        return np.ctypeslib.as_array(values)

    def _run(self) -> None:
        """Read the experts that passes ask for, then those that are predicted."""
        with self._pool:
            while self._wait_for_work(lambda: self._answered != self._asked or self._ahead.size > 0):
                try:
                    self._read_next()
                except MemoryError:
                    # A pass would wait forever for a reader that has ended.
                    self._fail(out_of_memory())

    def _read_next(self) -> None:
        """Read the experts that a pass waits for, or else the next predicted one."""
        with self._state:
            asked = self._asked
            is_ahead = self._answered == asked
            wanted = self._ahead[:1] if is_ahead else self._needed
            protected = np.concatenate([self._needed, self._ahead]) if is_ahead else self._needed
            wanted = wanted[~self._present[wanted]]
            missing = LayerRanges(0, 0, tuple(self._ranges(wanted)))
            removed = self._make_room(missing.size_bytes, protected)
            self._ahead = self._ahead[1:] if removed is not None else self._ahead[:0]
        if removed is None:
            return
        for part in removed:
            self._free(part)
        error = self._read_layer(missing, self._restarts) if missing.ranges else None
        with self._state:
            if error is None:
                self._present[wanted] = True
                self._held_bytes += missing.size_bytes
                self.read_bytes += missing.size_bytes
                self.ahead_bytes += missing.size_bytes * is_ahead
            else:
                self._free(missing)
            if not is_ahead:
                self._answered, self._error = asked, error
            self._state.notify_all()

    def _fail(self, error: BackendError) -> None:
        """Report an error to the pass that waits for experts, and read nothing ahead."""
        with self._state:
            self._ahead = self._ahead[:0]
            if self._answered != self._asked:
                self._answered, self._error = self._asked, error
            self._state.notify_all()

    def _make_room(self, needed_bytes: int, protected: NDArray[np.int64]) -> list[LayerRanges] | None:
        """Choose the experts to free for others, or return None if there is not enough room.

        The least used experts that are not `protected` are freed first.
        """
        uses = np.where(self._present, self._uses, math.inf)
        uses[protected] = math.inf
        removed: list[int] = []
        held_bytes = self._held_bytes
        while held_bytes + needed_bytes > self._limit_bytes:
            least = int(uses.argmin())
            if math.isinf(uses[least]):
                return None
            uses[least] = math.inf
            removed.append(least)
            held_bytes -= int(self._table.sizes[least])
        # Change the state last, because the memory for these lists can be missing.
        parts = [self._table.part(number) for number in removed]
        self._present[removed] = False
        self._held_bytes = held_bytes
        return parts

    def _adapt(self, spare_bytes: int) -> None:
        """Free the least used experts if memory is low, and keep more of them again when there is enough."""
        with self._state:
            limit_bytes = max(self._held_bytes + spare_bytes, self._table.largest_layer_bytes)
            self._limit_bytes = min(limit_bytes, self._pool_bytes)
            # A pass may be computing with the experts that it has asked for last.
            removed = self._make_room(0, self._needed)
        for part in removed or ():
            self._free(part)

    def begin_pass(self, is_interrupted: Callable[[], bool], layers: int | None = None) -> None:
        self._is_interrupted, self._stopped, self._failed = is_interrupted, False, False
        self._passed.clear()
        self._predicted.clear()
        self._expected = sum(layers is None or layer < layers for layer in self._table.layers)
        if self._tokens >= _HALVED_AFTER_TOKENS:
            self._uses, self._tokens = self._uses / 2, 0

    def end_pass(self, *, is_partial: bool) -> None:
        if self._failed and self._error is not None:
            raise self._error
        if self._stopped:
            raise CancelledError("the model's computation was cancelled")
        if len(self._passed) < self._expected and not is_partial:
            raise CapabilityError(
                "this model cannot run from disk, because llama.cpp does not report which experts it uses",
                "choose a model that fits in memory",
            )

    def is_stop(self, name: bytes) -> bool:
        return name in self._choices or name in self._inputs

    def on_node(self, name: bytes, tensor: int) -> bool:
        """Wait for the experts that the router has chosen. Return whether the pass can continue."""
        if (position := self._inputs.get(name)) is not None:
            self._predicted[position] = self._predict(position, tensor)
            return True
        position = self._choices[name]
        rows = _chosen_experts(tensor)
        counts = np.bincount(rows.ravel(), minlength=self._table.count)
        start = position * self._table.count
        self._uses[start : start + self._table.count] += counts
        self._tokens += len(rows) if position == 0 else 0
        needed = start + np.flatnonzero(counts)
        self._check_prediction(position, needed)
        with self._lock:
            self._needed = needed
            self._ahead = self._ahead[:0]
            if not self._present[needed].all():
                self._asked += 1
                self._state.notify_all()
                while self._answered != self._asked and not self._stopped:
                    self._state.wait(POLL_SECONDS)
                    self._stopped = self._closed or self._is_interrupted()
                self._failed = not self._stopped and self._error is not None
            ahead = self._predicted.get(position + 1)
            if ahead is not None and self._right_guesses >= _MIN_RIGHT_SHARE * self._guesses:
                self._ahead = ahead[~self._present[ahead]]
                self._state.notify_all()
            self._passed.add(position)
            return not self._failed and not self._stopped

    def _predict(self, position: int, tensor: int) -> NDArray[np.int64]:
        """Return the experts that a layer will use, predicted from the hidden states of the layer before it.

        Attention in between changes the states, so the prediction can be wrong.
        """
        router = self._table.routers[position]
        assert router is not None
        weight = self._floats(router.weight).reshape(self._table.count, -1)
        states = np.empty((ggml().ggml_nrows(tensor), weight.shape[1]), np.float32)
        if not 0 < len(states) <= _MAX_AHEAD_TOKENS or states.nbytes != ggml().ggml_nbytes(tensor):
            return self._ahead[:0]
        ggml().ggml_backend_tensor_get(tensor, states.ctypes.data, 0, states.nbytes)
        if router.norm is not None:
            states *= self._floats(router.norm)
        chosen = np.argpartition(states @ weight.T, -self._table.used)[:, -self._table.used :]
        return position * self._table.count + np.unique(chosen)

    def _check_prediction(self, position: int, needed: NDArray[np.int64]) -> None:
        predicted = self._predicted.pop(position, self._ahead[:0])
        if predicted.size:
            self._guesses = _REMEMBERED * self._guesses + predicted.size
            self._right_guesses = _REMEMBERED * self._right_guesses + int(np.isin(predicted, needed).sum())

    def close(self) -> None:
        super().close()
        if self._tokens:
            Facts().put(_KIND, {self._table.key: np.rint(self._uses).astype(int).tolist()})
            self._tokens = 0


def _chosen_experts(tensor: int) -> NDArray[np.int32]:
    """Return the experts that a router has chosen, as int32 [tokens, experts per token].

    The tensor is a view of the first columns of a larger one. ggml has no function for its row stride, which
    is therefore computed from its size.
    """
    library = ggml()
    tokens, values = library.ggml_nrows(tensor), library.ggml_nbytes(tensor) // 4
    if not tokens or not library.ggml_nelements(tensor):
        return np.empty((0, 0), np.int32)
    used = library.ggml_nelements(tensor) // tokens
    stride = (values - used) // (tokens - 1) if tokens > 1 else used
    flat = np.ctypeslib.as_array((ctypes.c_int32 * values).from_address(library.ggml_get_data(tensor)))
    return np.lib.stride_tricks.as_strided(flat, (tokens, used), (4 * stride, 4)).copy()
