"""Run a GGUF model that is larger than memory by reading part of its weights from disk in every pass.

llama.cpp maps a model's files into memory. A `WeightStream` replaces this mapping with private memory at the
same addresses. The stream reads the weights that stay in memory once. It reads the other weights in every
pass, a few layers ahead of the layer that llama.cpp is computing, and frees a layer's weights as soon as the
layer is computed.

With the mapping alone, the kernel evicts the least recently used pages, which are exactly those that the next
pass needs first. Each pass then reads nearly the whole file, page by page, while the processor waits. The
kernel also evicts other programs' cached files, and a truncated file kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter as now
from typing import Any, NamedTuple

from edgespec.backends.llamacpp.devices import has_own_memory
from edgespec.backends.llamacpp.native import library
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    EdgespecError,
    OutOfMemoryError,
)
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.formats.gguf_files import gguf_files, tensor_size
from edgespec.model.formats.gguf_header import read_header
from edgespec.system.disks import PARALLEL_READS, READ_BYTES, drop_cached, open_uncached

__all__ = [
    "FEED_FORWARD",
    "PAGE",
    "POLL_SECONDS",
    "FileRange",
    "LayerRanges",
    "WeightStream",
    "advise",
    "can_stream",
    "choose_streamed",
    "file_mappings",
    "forget_peak_memory",
    "out_of_memory",
    "replace_mapping",
    "saved_bytes",
    "spread_evenly",
    "streamable_layers",
    "unloaded_ranges",
]

# Number of streamed layers in memory at a time: one being computed, and one being read or ready. A third
# would save no time, because a layer takes nearly the same time in every pass: either the disk or the
# processor is never idle with two. If memory is low, there is only the one being computed.
LAYERS_IN_MEMORY = 2
# The weights that can be streamed, including experts and shared experts. They make up most of a model, and
# reading them once serves all tokens of a pass. The router (`ffn_gate_inp`) stays in memory, because it is
# small.
FEED_FORWARD = re.compile(r"blk\.(\d+)\.ffn_(?:up|gate|down|gate_up)(?:_exps|_chexps|_shexp)?\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER_OUTPUT = re.compile(rb"l_out-(\d+)")
PAGE = mmap.PAGESIZE
# Interval in which a waiting pass checks whether it was interrupted. Chosen.
POLL_SECONDS = 0.05
# Minimum time in seconds between checks of the free memory. It was chosen to keep the overhead of these
# checks low.
_CHECK_SECONDS = 1.0
_MAP_FIXED, _MADV_DONTNEED = 0x10, 4
# Flags of Linux's `mremap`: move pages to a fixed address, and leave the old address range mapped but empty.
_MREMAP_FLAGS = 0x1 | 0x2 | 0x4
# Without this flag, Linux refuses mappings larger than the machine's memory. Python's `mmap` module provides
# it only since version 3.13.
_MAP_NORESERVE = 0x4000


class FileRange(NamedTuple):
    """A part of a file that starts and ends at page boundaries."""

    file: int
    offset: int
    size_bytes: int


class LayerRanges(NamedTuple):
    """The feed-forward weights of a layer that can be streamed.

    Attributes:
        layer: Index of the layer.
        before: Index of the nearest earlier layer that has feed-forward weights. At the end of that layer, a
            pass waits for the weights of this one. Layers without feed-forward weights are skipped, because
            llama.cpp does not name the ends of some of them.
        ranges: The parts of the model's files that contain these weights.
    """

    layer: int
    before: int
    ranges: tuple[FileRange, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.ranges)


def can_stream(gpu_layers: int | None = None) -> bool:
    """Return whether this system can stream weights, which requires Linux and all layers on the CPU.

    A GPU that shares main memory adds no memory, so streamed models do not use it.
    See `LoadOptions` for `gpu_layers`.
    """
    return sys.platform == "linux" and (
        gpu_layers == 0
        or not library().llama_supports_gpu_offload()
        or (gpu_layers is None and not has_own_memory())
    )


def streamable_layers(path: Path) -> list[LayerRanges]:
    """Return the layers of a GGUF model whose feed-forward weights can be streamed, in order.

    The first layer is never streamed, because a pass waits for a layer's weights at the end of the previous
    layer.

    Raises:
        ModelFileError: A file cannot be read.
    """
    found: dict[int, list[FileRange]] = defaultdict(list)
    for name, pages, drafts in _tensors(path):
        match = FEED_FORWARD.fullmatch(name)
        if match and not drafts:
            found[int(match[1])] += [pages] if pages.size_bytes else []
    return [
        LayerRanges(layer, before, tuple(found[layer]))
        for before, layer in pairwise(sorted(found))
        if found[layer]
    ]


def unloaded_ranges(path: Path) -> list[FileRange]:
    """Return the parts of a GGUF model that contain only multi-token prediction layers."""
    return [pages for _, pages, drafts in _tensors(path) if drafts and pages.size_bytes]


def _tensors(path: Path) -> Iterator[tuple[str, FileRange, bool]]:
    """Yield each tensor's name, the pages that it fills, and whether it belongs to an MTP layer.

    Partly filled pages at either end are excluded, because they also hold other data.
    """
    headers = [(file, read_header(file)) for file in gguf_files(path)]
    # Only the first file of a multi-part model contains the metadata.
    first = headers[0][1]
    layers = first.architecture_number("block_count") - first.architecture_number("nextn_predict_layers")
    for number, (file, header) in enumerate(headers):
        ends = sorted({*(tensor.offset_bytes for tensor in header.tensors)})
        following = dict(zip(ends, [*ends[1:], file.stat().st_size - header.size_bytes], strict=True))
        for tensor in header.tensors:
            begin, end = (
                header.size_bytes + tensor.offset_bytes,
                header.size_bytes + following[tensor.offset_bytes],
            )
            if size_bytes := tensor_size(tensor):
                # llama.cpp does not map the rest of the file after the last tensor.
                end = min(end, begin + size_bytes)
            begin, end = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
            layer = _LAYER.match(tensor.name)
            drafts = layer is not None and int(layer[1]) >= layers
            yield tensor.name, FileRange(number, begin, max(0, end - begin)), drafts


def choose_streamed(layers: Sequence[LayerRanges], options: LoadOptions) -> list[LayerRanges]:
    """Choose which of the streamable layers to stream."""
    allowed = options.streamable
    layers = layers if allowed is None else [layer for layer in layers if layer.layer in allowed]
    return spread_evenly(layers, min(options.streamed_layers, len(layers)))


def spread_evenly(layers: Sequence[LayerRanges], count: int) -> list[LayerRanges]:
    """Choose `count` evenly spaced layers, so that their weights can be read while others are computed."""
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]


def saved_bytes(streamed: Sequence[LayerRanges]) -> int:
    """Return how many bytes of memory streaming these layers saves."""
    return sum(sorted(layer.size_bytes for layer in streamed)[:-LAYERS_IN_MEMORY])


class _EarlyReads(NamedTuple):
    """Reads of a layer that began before the reads of the layer before it ended.

    Attributes:
        number: Number of streamed layers before this one, counted as in `WeightStream`.
        layer: The layer.
        restarts: How often the passes had been restarted.
        reads: The reads that were submitted.
    """

    number: int
    layer: LayerRanges
    restarts: int
    reads: list[Future[None]]


class WeightStream:
    """Reads the streamed layers of a model's weights before they are needed.

    Passes must run one at a time, and each must compute all layers in order.

    Args:
        files: The model's files.
        mapped: The addresses at which llama.cpp has mapped them. See `file_mappings`.
        streamed: The layers to stream. All other weights are read immediately.
        unloaded: Parts of the files that llama.cpp does not use, so they are not read at all.
        progress: Called while reading. Returning False raises CancelledError.

    Attributes:
        layers: Indices of the streamed layers.
        bytes_per_pass: Number of bytes read in each pass.
        saved_bytes: Number of bytes of memory that streaming saves.

    Raises:
        BackendError: The files cannot be read, or there is not enough memory.
    """

    def __init__(
        self,
        files: Sequence[Path],
        mapped: Sequence[tuple[int, int, int, int]],
        streamed: Sequence[LayerRanges],
        progress: Progress | None = None,
        unloaded: Sequence[FileRange] = (),
    ) -> None:
        self.layers = tuple(layer.layer for layer in streamed)
        self.bytes_per_pass = sum(layer.size_bytes for layer in streamed)
        self.saved_bytes = saved_bytes(streamed)
        self._paths, self._mapped, self._layers = files, mapped, streamed
        # Number of bytes of each range that are moved from layer to layer. It is the same for all layers,
        # because many kernels cannot move pages of which only some were moved before.
        self._moved_bytes = [
            min(each.size_bytes for each in ranges)
            for ranges in zip(*(layer.ranges for layer in streamed), strict=False)
        ]
        # Number of streamed layers that a pass computes.
        self._count = len(streamed)
        self._order = {layer.layer: index for index, layer in enumerate(streamed)}
        # Indices of the layers after which a pass waits for the next streamed layer.
        self._waits = {layer.before for layer in streamed}
        # Passes acquire this lock instead of the Condition, because Ctrl-C can interrupt a Condition's
        # methods at any point, even while they acquire the lock. RLock's methods cannot be interrupted.
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        # Number of streamed layers that passes have finished, and number of layers that have been read. Both
        # counts continue across passes. If a pass is cancelled, they are reset to the start of a pass.
        self._done = self._read = 0
        # Number of streamed layers that passes have waited for. If a pass does not wait for a layer, it may
        # compute the layer before its weights have been read.
        self._awaited = 0
        self._missed = False
        # Maximum number of streamed layers in memory.
        self._max_layers = LAYERS_IN_MEMORY
        self._spare_bytes: Callable[[], int] | None = None
        self._next_check = 0.0
        # The reads of the next layer, if they began before those of the layer before it ended. Used only in
        # the reader's thread.
        self._early: _EarlyReads | None = None
        # A layer that has been computed, but whose memory is kept for the next layer to be read.
        self._spare: LayerRanges | None = None
        # Whether all passes so far ended as planned. If not, `_done` may be wrong.
        self._is_intact = True
        self._restarts = 0
        self._closed = False
        self._error: EdgespecError | None = None
        # Whether the current pass needs a layer that could not be read.
        self._failed = False
        self._is_interrupted: Callable[[], bool] = bool
        # Whether the current pass was interrupted, and the value of `_done` at its start.
        self._stopped, self._first = False, 0
        with ExitStack() as undo:
            self._files, self._states = [], []
            for path in files:
                self._files.append(_open(path))
                undo.callback(os.close, self._files[-1])
                self._states.append(_state(self._files[-1]))
            for _, _, begin, end in mapped:
                replace_mapping(begin, end)
            forget_peak_memory()
            self._read_kept(progress, unloaded)
            self._reader = threading.Thread(target=self._run, name="edgespec-weights", daemon=True)
            undo.callback(self._stop)
            try:
                self._pool = _start_pool()
                undo.callback(self._pool.shutdown)
                self._reader.start()
            except RuntimeError as error:
                raise BackendError(
                    f"cannot start a thread to read the weights: {error}",
                    "raise the limit on processes (ulimit -u), or close other programs",
                    code="out_of_memory",
                ) from error
            undo.pop_all()

    def _read_kept(self, progress: Progress | None, unloaded: Sequence[FileRange]) -> None:
        streamed = sorted([*unloaded, *(each for layer in self._layers for each in layer.ranges)])
        kept = []
        for file, offset, begin, end in self._mapped:
            at = offset
            for each in streamed:
                if each.file == file and offset <= each.offset < offset + end - begin:
                    kept.append(FileRange(file, at, each.offset - at))
                    at = each.offset + each.size_bytes
            kept.append(FileRange(file, at, offset + end - begin - at))
        total, done = sum(each.size_bytes for each in kept) or 1, 0
        for each in kept:
            for part in _parts(each):
                self._load(part)
                done += part.size_bytes
                if progress and not progress("reading the weights that stay in memory", done / total):
                    raise CancelledError("loading the model was cancelled")

    def _address(self, part: FileRange) -> int:
        for file, offset, begin, end in self._mapped:
            if file == part.file and offset <= part.offset < offset + end - begin:
                return begin + part.offset - offset
        raise BackendError(
            f"llama.cpp did not map {self._paths[part.file]} into memory",
            "choose a model that fits in memory",
        )

    def _load(self, part: FileRange) -> None:
        """Read part of a file into memory.

        Raises:
            BackendError: The file is unreadable or has changed.
            OutOfMemoryError: There is not enough memory.
        """
        file, address, done = self._files[part.file], self._address(part), 0
        size_bytes, _ = self._states[part.file]
        try:
            # The last page of a file may be incomplete.
            while done < min(part.size_bytes, size_bytes - part.offset):
                buffer = (ctypes.c_char * (part.size_bytes - done)).from_address(address + done)
                count = os.preadv(file, [buffer], part.offset + done)
                if not count:
                    break
                done += count
            drop_cached(file, part.offset, part.size_bytes)
            if _state(file) == self._states[part.file]:
                return
            reason = "the file was changed while the model was in use"
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise out_of_memory() from error
            reason = error.strerror or str(error)
        raise BackendError(
            f"the weights in {self._paths[part.file]} cannot be read: {reason}",
            "check that the file and its disk are intact, then load the model again",
            code="model_file_unreadable",
        )

    def _free(self, layer: LayerRanges) -> None:
        for each in layer.ranges:
            advise(self._address(each), each.size_bytes, _MADV_DONTNEED)

    def _release(self, layer: LayerRanges) -> None:
        """Keep the memory of a computed layer for the next layer to be read, or free it."""
        with self._lock:
            if self._max_layers > 1 and self._spare is None:
                self._spare = layer
                return
        self._free(layer)

    def _reuse_spare(self, layer: LayerRanges | None) -> None:
        """Move the memory that was kept to the addresses of `layer`, and free the rest of it.

        New memory would cost as much time of a processor as reading does, because the kernel clears it.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return
        if layer is not None and spare is not layer:
            for old, new, size in zip(spare.ranges, layer.ranges, self._moved_bytes, strict=False):
                if not move_pages(self._address(old), self._address(new), size):
                    # Another thread could be given the address while it is not mapped, so do not try again.
                    self._moved_bytes = []
                    break
        if spare is not layer:
            self._free(spare)

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        """Keep fewer weights in memory while memory is low. See `LanguageModel.watch_memory`."""
        self._spare_bytes = spare_bytes

    def _run(self) -> None:
        """Read the streamed layers in a cycle, pausing while `_max_layers` of them are in memory."""
        with self._pool:
            while self._wait_for_work(lambda: self._can_read):
                self._drop_outdated_reads()
                with self._state:
                    if self._closed:
                        return
                    if not self._can_read or self._has_outdated_reads:
                        continue
                    layer, restarts = self._layers[self._read % self._count], self._restarts
                error = self._read_layer(layer, restarts)
                with self._state:
                    if self._is_outdated(restarts):
                        self._free(layer)
                    else:
                        self._read, self._error = self._read + 1, error
                    self._state.notify_all()

    def _wait_for_work(self, has_work: Callable[[], bool]) -> bool:
        """Wait in the reader's thread until there is work or a second has passed, and check the memory.

        Returns:
            False if the stream was closed.
        """
        with self._state:
            # Check the memory while waiting too, because weights that were read stay in memory.
            self._state.wait_for(lambda: self._closed or has_work(), _CHECK_SECONDS)
        self._check_memory()
        return not self._closed

    def _read_layer(self, layer: LayerRanges, restarts: int) -> BackendError | None:
        """Read a layer's weights unless the passes restart meanwhile. Return the first error, or None."""
        early, self._early = self._early, None
        reads: list[Future[None]] = []
        try:
            if early is not None and early.restarts == restarts:
                reads = early.reads
            else:
                self._begin_reads(layer, restarts, reads)
            # Begin the reads of the next layer when these are about to end, so that the disk is never idle.
            wait(reads[: 1 - PARALLEL_READS])
            self._begin_early(restarts)
        except RuntimeError:
            # The interpreter is shutting down and the model was never closed, so no new reads can be
            # submitted. `submit` cannot raise RuntimeError for any other reason, because all threads of the
            # pool have been started.
            wait(reads)
            return BackendError("cannot read the weights, because edgespec is exiting")
        except MemoryError:
            wait(reads)
            return out_of_memory()
        except BackendError as error:
            wait(reads)
            return error
        # Wait for all reads, because none may still be writing when the memory is used, freed or reused.
        wait(reads)
        try:
            for read in reads:
                read.result()
        except BackendError as error:
            return error
        except MemoryError:
            return out_of_memory()
        except Exception as error:
            # Report every error, because passes would otherwise wait forever for a reader that has exited.
            return BackendError(
                f"the weights cannot be read: {error!r}",
                "load the model again",
                code="model_file_unreadable",
            )
        return None

    def _begin_reads(self, layer: LayerRanges, restarts: int, reads: list[Future[None]]) -> None:
        """Submit the reads of a layer, unless the passes restart before they begin, and add them to `reads`.

        Raises:
            RuntimeError: The interpreter is shutting down.
            MemoryError: There is not enough memory. Some of the reads may have been submitted.
        """

        def load(part: FileRange) -> None:
            if not self._is_outdated(restarts):
                self._load(part)

        self._reuse_spare(layer)
        reads.extend(self._pool.submit(load, part) for each in layer.ranges for part in _parts(each))

    def _begin_early(self, restarts: int) -> None:
        """Begin to read the layer after the one being read if there is room for it."""
        with self._lock:
            number = self._read + 1
            has_room = number - self._done < min(self._max_layers, self._count)
            if not has_room or self._error is not None or self._is_outdated(restarts):
                return
            layer = self._layers[number % self._count]
        # Set the attribute first, because reads that were submitted must end before the memory is reused.
        self._early = _EarlyReads(number, layer, restarts, [])
        self._begin_reads(layer, restarts, self._early.reads)

    def _drop_outdated_reads(self) -> None:
        """End early reads that are not for the next layer, because the passes or the limit have changed."""
        with self._lock:
            if not self._has_outdated_reads:
                return
        early, self._early = self._early, None
        assert early is not None
        wait(early.reads)
        self._free(early.layer)

    @property
    def _has_outdated_reads(self) -> bool:
        early = self._early
        return early is not None and (
            early.number != self._read or self._is_outdated(early.restarts) or not self._has_room
        )

    def _is_outdated(self, restarts: int) -> bool:
        return self._closed or restarts != self._restarts

    @property
    def _has_room(self) -> bool:
        return self._read - self._done < min(self._max_layers, self._count)

    @property
    def _can_read(self) -> bool:
        return self._has_room and self._error is None

    def _check_memory(self) -> None:
        """Adapt to the free memory, at most once per second. Called only in the reader's thread."""
        if self._spare_bytes is None or now() < self._next_check:
            return
        self._next_check = now() + _CHECK_SECONDS
        # Passes would wait forever for a reader that has ended.
        with suppress(Exception):
            self._adapt(self._spare_bytes())

    def _adapt(self, spare_bytes: int) -> None:
        """Free the layers that were read ahead if memory is low. See `LanguageModel.watch_memory`."""
        with self._state:
            if spare_bytes < 0 and self._max_layers > 1 and self._error is None:
                self._max_layers = 1
                self._reuse_spare(None)
                # A pass may be computing the layer that it has waited for.
                first = max(self._done, self._awaited)
                for number in range(first, self._read):
                    self._free(self._layers[number % self._count])
                self._read = min(self._read, first)
            elif spare_bytes >= self._read_ahead_bytes:
                # With less, memory would be low again as soon as these layers had been read.
                self._max_layers = LAYERS_IN_MEMORY

    @property
    def _read_ahead_bytes(self) -> int:
        """Maximum size of the layers that are read ahead of the one being computed."""
        return sum(sorted(layer.size_bytes for layer in self._layers)[1 - LAYERS_IN_MEMORY :])

    def begin_pass(self, is_interrupted: Callable[[], bool], layers: int | None = None) -> None:
        """Prepare for a pass. If the last one was not finished, restart at the first streamed layer.

        Args:
            is_interrupted: Returns whether to stop waiting for weights.
            layers: Number of leading layers that the pass computes, or None for all. The weights of other
                layers are not read.

        Raises:
            BackendError: The weights cannot be read.
        """
        self._is_interrupted, self._stopped = is_interrupted, False
        # The reader reads the layers in a cycle, which must not be empty.
        count = max(1, sum(layers is None or layer.layer < layers for layer in self._layers))
        with self._lock:
            is_next = self._is_intact and self._done % self._count == 0 and count == self._count
            if self._error is not None or not is_next:
                # Retry after a disk failure, which may have been temporary.
                self._error = None
                for number in range(self._done, self._read):
                    self._free(self._layers[number % self._count])
                self._done, self._read, self._count = 0, 0, count
                self._restarts += 1
                self._state.notify_all()
            self._first = self._awaited = self._done
            self._missed = self._is_intact = self._failed = False

    def end_pass(self, *, is_partial: bool) -> None:
        """Check that all weights were read in time for a pass that llama.cpp reports as successful.

        Args:
            is_partial: Whether the pass was meant to stop after some of the layers.

        Raises:
            BackendError: The weights could not be read.
            CancelledError: The pass was interrupted.
            CapabilityError: llama.cpp does not name the layers of this model.
        """
        if self._failed and self._error is not None:
            raise self._error
        if self._stopped:
            raise CancelledError("the model's computation was cancelled")
        finished = self._done - self._first
        if self._missed or (not is_partial and (not finished or finished % self._count)):
            raise CapabilityError(
                "this model cannot run from disk, because llama.cpp does not report its layers",
                "choose a model that fits in memory",
            )
        self._is_intact = True

    def is_stop(self, name: bytes) -> bool:
        """Return whether a pass must call `on_node` when it has computed the tensor `name`."""
        match = _LAYER_OUTPUT.fullmatch(name)
        return match is not None and (int(match[1]) in self._waits or int(match[1]) in self._order)

    def on_node(self, name: bytes, tensor: int) -> bool:  # noqa: ARG002
        """Handle the tensor `name`, which a pass has computed. Return whether the pass can continue."""
        return self.on_layer(name)

    def on_layer(self, name: bytes) -> bool:
        """Free a computed layer, and wait for the next one. Return whether the pass can continue."""
        layer = int(name.rpartition(b"-")[2])
        with self._lock:
            if layer in self._order:
                position = self._done % self._count
                self._missed |= self._awaited <= self._done or self._order[layer] != position
                self._release(self._layers[self._order[layer]])
                self._done += 1
                self._state.notify_all()
            if layer in self._waits and self._done < self._first + self._count:
                while self._read <= self._done and self._error is None and not self._stopped:
                    self._state.wait(POLL_SECONDS)
                    self._stopped = self._closed or self._is_interrupted()
                self._awaited = self._done + 1
                # After an error, the reader stops, and the last layer that it counted is the one that it
                # could not read. The pass can continue if it does not need that layer.
                self._failed = self._error is not None and self._read <= self._awaited
            return not self._failed and not self._stopped

    def close(self) -> None:
        """Stop reading. Must be called before the model is freed."""
        self._stop()
        for file in self._files:
            os.close(file)
        self._files = []

    def _stop(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._reader.is_alive():
            self._reader.join()


def file_mappings(files: Sequence[Path]) -> set[tuple[int, int, int, int]]:
    """Return where this process has mapped files, as (file index, offset, begin, end) tuples."""
    numbers = {os.path.realpath(file): number for number, file in enumerate(files)}
    found = set()
    # Do not use `splitlines`, which would also split at unusual line breaks inside paths.
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).removesuffix("\n").split("\n"):
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0] in numbers:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.add((numbers[path[0]], int(offset, 16), begin, end))
    return found


def _start_pool() -> ThreadPoolExecutor:
    """Return a pool with all threads started. Raises RuntimeError if a thread cannot be started.

    Otherwise, `submit` would start threads one by one, and a failure would leave a queued read.
    """
    pool, start = ThreadPoolExecutor(PARALLEL_READS, "edgespec-read"), threading.Barrier(PARALLEL_READS)
    try:
        for _ in range(PARALLEL_READS):
            # A thread that waits is not idle, so each call starts another one.
            pool.submit(start.wait)
    except RuntimeError:
        start.abort()
        pool.shutdown()
        raise
    return pool


def out_of_memory() -> OutOfMemoryError:
    """Return the error of a pass for which weights could not be read."""
    return OutOfMemoryError(
        "there is not enough memory to read the weights",
        "close other programs, or load the model with a smaller --memory",
    )


def _parts(whole: FileRange) -> Iterator[FileRange]:
    for start in range(0, whole.size_bytes, READ_BYTES):
        yield FileRange(whole.file, whole.offset + start, min(READ_BYTES, whole.size_bytes - start))


def _state(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def _open(path: Path) -> int:
    try:
        return open_uncached(path)
    except OSError as error:
        raise BackendError(
            f"{path} cannot be read: {error.strerror}", "check the path", code="model_file_unreadable"
        ) from error


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    ]
    return libc


def replace_mapping(begin: int, end: int) -> None:
    """Replace mapped pages of a file with private ones, which take up no memory until they are written."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    if _libc().mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0) != begin:
        raise BackendError(
            f"memory for the weights cannot be reserved: {os.strerror(ctypes.get_errno())}",
            "raise the limit on address space (ulimit -v), or set vm.overcommit_memory to 0",
            code="out_of_memory",
        )


def move_pages(begin: int, end: int, size_bytes: int) -> bool:
    """Move private pages from one address to another without copying them, if the kernel can.

    Both ranges stay mapped. If the pages cannot be moved, nothing changes.

    Args:
        begin: The address of the pages.
        end: Their new address. The pages there are freed.
        size_bytes: The size of both ranges, which must not overlap.

    Returns:
        Whether the pages were moved.

    Raises:
        BackendError: There is not enough address space.
    """
    if _libc().mremap(begin, size_bytes, size_bytes, _MREMAP_FLAGS, end) == end:
        return True
    # The kernel may have unmapped the new address before it failed.
    replace_mapping(end, end + size_bytes)
    return False


def forget_peak_memory() -> None:
    """Reset this process's recorded peak memory after a file mapping was replaced.

    The peak includes the pages of the file that llama.cpp had mapped, although the kernel could have reused
    their memory at any time.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Tell the kernel how memory is used. See `madvise(2)`."""
    _libc().madvise(address, size_bytes, advice)
