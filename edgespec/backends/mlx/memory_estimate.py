"""Estimate the memory use of MLX models from their configuration and weight file headers.

MLX evaluates arrays lazily, so we build the model and the graph of a one-token pass, and read the shapes of
the arrays without evaluating them. The same sizes decide which layers run on which worker.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.mlx.attention_cache import cache_rows
from edgespec.backends.mlx.build_info import mlx_core, runs_on_cpu, use_in_this_process
from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state, reuse_stream
from edgespec.backends.mlx.layer_block import check_separable
from edgespec.backends.mlx.layers import LayerList
from edgespec.backends.mlx.model_skeleton import WeightSizes, parameter_bytes, read_skeleton, trace_one_token
from edgespec.backends.mlx.tensor_shards import ShardIndex, shard_for_transfer
from edgespec.backends.mlx.weight_loading import (
    KV_BITS,
    MAX_WIDTH,
    LayerPlacement,
    check_options,
    prefill_batch_tokens,
)
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import split_layers
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.mlx_metadata import language_config
from edgespec.model.memory_estimate import (
    THIS_MACHINE,
    MachineShare,
    MemoryEstimate,
    MemoryPart,
    requested_context,
)
from edgespec.model.model_facts import Adapter
from edgespec.system.files import format_bytes

__all__ = ["MlxMemoryEstimator"]

# Measured size of a tokenizer, in bytes per vocabulary token.
_TOKEN_BYTES = 500
# Ratio of the memory that MLX allocates for a recurrent layer to the memory that the layer needs, measured on
# a GPU.
_ALLOCATED_AHEAD = 2
# Measured number of copies of a recurrent layer's state that mlx-lm holds while it computes the layer token
# by token.
_LOOPED_COPIES = 3
_FileStamps = tuple[tuple[str, int, int], ...]
# For each attention layer, the bytes per token of its KV cache, and its sliding window in tokens or None.
_LayerCaches = Sequence[tuple[int, int | None]]


class _CacheSizes(NamedTuple):
    """Sizes of a model's caches.

    Attributes:
        total_bytes: Maps a context length in tokens to the size of all caches in bytes.
        layers: The KV cache of each attention layer.
        state_bytes: Size in bytes of one copy of the recurrent states.
    """

    total_bytes: Callable[[int], int]
    layers: _LayerCaches
    state_bytes: int


class _ModelShape(NamedTuple):
    """Properties of a model that determine its memory use.

    Attributes:
        sizes: Sizes of the weights and the KV cache, used to decide whether to widen the weights to float32.
        weight_bytes: Size of the weights in bytes, as stored and after widening to float32.
        intermediate_size: Inner size of the feed-forward network.
        scans: A function per recurrent layer that maps a token count to the layer's memory use in array
            elements.
        caches: Cache sizes, keyed by bits per element and whether the weights are widened.
    """

    sizes: WeightSizes
    weight_bytes: list[int]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    scans: list[Callable[[int], int]]
    caches: dict[tuple[int | None, bool], _CacheSizes]


class _LayerSizes(NamedTuple):
    """The size in bytes of each layer's weights, and the layers' KV caches."""

    weight_bytes: Sequence[int]
    caches: _LayerCaches


class MlxMemoryEstimator:
    """Estimates the memory use of the MLX model in a folder.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        BackendMissingError: mlx or mlx-lm is not installed.
    """

    layers = 0
    longrope_switch_tokens = 0
    streamable_layers = 0
    why_not_shared = "MLX generates one reply at a time"

    def __init__(self, path: str, name: str, options: LoadOptions) -> None:
        use_in_this_process()
        reuse_stream()
        self.name, self._path = name, path
        folders = [path, *(adapter.path for adapter in options.adapters)]
        self._stamps = tuple(_file_stamps(Path(folder)) for folder in folders)
        self._shape = _read_shape(path, name, options.adapters, options.low_bits, self._stamps)
        self.trained_context_tokens: int = self._shape.sizes.trained_context_tokens

    def streamed_bytes(self, options: LoadOptions) -> dict[int, int]:  # noqa: ARG002
        return {}

    def expert_reads(self, options: LoadOptions) -> None:  # noqa: ARG002
        return None

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        check_options(options)
        shape = self._shape
        tokens = requested_context(options, self.trained_context_tokens)
        widened, bits = shape.sizes.widens(options), KV_BITS[options.kv_type]
        if (bits, widened) not in shape.caches:
            raise OptionError(
                f"{self.name} does not support kv_type {options.kv_type!r}",
                "use --kv-type auto",
                option="kv_type",
                code="option_not_supported",
            )
        machines: tuple[MachineShare, ...] = ()
        if options.workers is None:
            cache = shape.caches[bits, widened]
            weight_bytes, cache_bytes = shape.weight_bytes[widened], cache.total_bytes(tokens)
            # Add a copy of the largest layer's cache, because caches are copied when they grow.
            copied_bytes = max(_cache_bytes(cache.layers, tokens), default=0)
            compute = self._pass_bytes(tokens if copied_bytes else 0, options, widened)
            compute += copied_bytes + cache.state_bytes + freed_buffers_bytes()
        else:
            placed = self.placement(options)
            widened, cache_bytes = placed.widened, placed.local_cache_bytes
            all_bytes = shape.weight_bytes[widened]
            weight_bytes = all_bytes - placed.layer_weight_bytes + placed.local_weight_bytes
            compute = self._pass_bytes(tokens if placed.local else 0, options, widened)
            compute += cache_bytes // max(1, placed.local) + freed_buffers_bytes()
            here = MachineShare(
                THIS_MACHINE,
                placed.local,
                weight_bytes,
                cache_bytes,
                compute,
                placed.local_weight_bytes / all_bytes,
                has_output=True,
            )
            machines = (here, *placed.workers)
        parts = (
            MemoryPart("weights", weight_bytes),
            MemoryPart("cache", cache_bytes),
            MemoryPart("compute", compute),
            MemoryPart("vocabulary", shape.vocab_size * _TOKEN_BYTES),
        )
        kv_type = options.kv_type if bits else "float32" if widened else "as the weights"
        return MemoryEstimate(tokens, kv_type, parts, machines)

    def placement(self, options: LoadOptions) -> LayerPlacement:
        """Return which layers each machine holds, for load options with workers.

        On CPUs, 16-bit weights are widened to float32 if the machines have enough memory.

        Raises:
            MemoryBudgetError: The layers do not fit.
            CapabilityError: The layers cannot be split across machines.
        """
        workers = options.workers
        assert workers is not None
        if runs_on_cpu():
            try:
                return self._place(options, workers, widened=True)
            except MemoryBudgetError:
                # The layers may fit if their weights are not widened.
                pass
        return self._place(options, workers, widened=False)

    def _place(self, options: LoadOptions, workers: ConnectedWorkers, *, widened: bool) -> LayerPlacement:
        tokens = requested_context(options, self.trained_context_tokens)
        sizes_of = partial(_layer_sizes, self._path, self.name, KV_BITS[options.kv_type], widened)
        whole = sizes_of(1, self._stamps)
        cache_bytes = _cache_bytes(whole.caches, tokens)
        # The memory that a pass needs on each worker.
        compute = self._pass_bytes(tokens, options, widened) + max(cache_bytes) + freed_buffers_bytes()
        if options.split_tensors:
            part = sizes_of(len(workers.links), self._stamps)
            part_cache_bytes = sum(_cache_bytes(part.caches, tokens))
            whole_bytes = sum(whole.weight_bytes) + sum(cache_bytes) + compute
            shares = self._place_parts(workers, part, part_cache_bytes, whole_bytes, compute, widened=widened)
            return LayerPlacement(widened, 0, 0, 0, sum(whole.weight_bytes), shares)
        return self._place_layers(workers, whole.weight_bytes, cache_bytes, compute, widened=widened)

    def _place_layers(
        self,
        workers: ConnectedWorkers,
        weight_bytes: Sequence[int],
        cache_bytes: Sequence[int],
        compute_bytes: int,
        *,
        widened: bool,
    ) -> LayerPlacement:
        """Divide the layers between this machine and the workers, in proportion to their memory."""
        layers = [sum(both) for both in zip(weight_bytes, cache_bytes, strict=True)]
        rooms = [link.memory_bytes - compute_bytes for link in workers.links]
        counts = split_layers(layers, [workers.local_bytes, *rooms])
        if counts is None:
            needed = sum(layers) + compute_bytes * len(rooms)
            offered = workers.local_bytes + sum(link.memory_bytes for link in workers.links)
            raise MemoryBudgetError(
                f"the layers of {self.name} need {format_bytes(needed)}, but the machines in --workers offer"
                f" only {format_bytes(offered)}",
                "add workers, raise the memory limits in --workers, or use a smaller --context or"
                " quantisation",
            )
        shares, local = [], counts[0]
        first = local
        for link, room, count in zip(workers.links, rooms, counts[1:], strict=True):
            own = slice(first, first + count)
            own_bytes = sum(weight_bytes[own])
            shares.append(
                MachineShare(
                    str(link.address),
                    count,
                    own_bytes,
                    sum(cache_bytes[own]),
                    compute_bytes if count else 0,
                    own_bytes / self._shape.weight_bytes[widened],
                    can_hold_all=split_layers(layers, [room]) is not None,
                )
            )
            first += count
        here = sum(weight_bytes[:local]), sum(cache_bytes[:local])
        return LayerPlacement(widened, local, *here, sum(weight_bytes), tuple(shares))

    def _place_parts(
        self,
        workers: ConnectedWorkers,
        part: _LayerSizes,
        cache_bytes: int,
        whole_bytes: int,
        compute_bytes: int,
        *,
        widened: bool,
    ) -> tuple[MachineShare, ...]:
        """Assign a shard of every layer to each worker."""
        weight_bytes, shares = sum(part.weight_bytes), []
        for link in workers.links:
            share = MachineShare(
                str(link.address),
                len(part.weight_bytes),
                weight_bytes,
                cache_bytes,
                compute_bytes,
                weight_bytes / self._shape.weight_bytes[widened],
                can_hold_all=whole_bytes <= link.memory_bytes,
                parts=len(workers.links),
            )
            if share.total_bytes > link.memory_bytes:
                raise MemoryBudgetError(
                    f"the part of {self.name} on the worker {link.address} needs"
                    f" {format_bytes(share.total_bytes)}, but the worker offers only"
                    f" {format_bytes(link.memory_bytes)}",
                    "add workers, request more memory from this one in --workers, use --split-mode layer, or"
                    " choose a smaller --context",
                )
            shares.append(share)
        return tuple(shares)

    def _pass_bytes(self, tokens: int, options: LoadOptions, widened: bool) -> int:
        shape, on_cpu, rows = self._shape, runs_on_cpu(), prefill_batch_tokens(options)
        # On CPUs, MLX stores the attention scores of all tokens in memory.
        scores = shape.attention_heads * tokens if on_cpu else 0
        row = 6 * shape.hidden_size + 2 * shape.intermediate_size + scores
        scan = max((elements(max(rows, MAX_WIDTH)) for elements in shape.scans), default=0)
        elements = max(
            rows * row,
            MAX_WIDTH * (row + 2 * shape.vocab_size),
            scan * (1 if on_cpu else _ALLOCATED_AHEAD),
        )
        return elements * (4 if widened or on_cpu else 2)

    def close(self) -> None:
        release_thread_state()


def _file_stamps(folder: Path) -> _FileStamps:
    """Return the name, size and modification time of each model file, to detect changes."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    stats = [(file.name, file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _cache_bytes(layers: _LayerCaches, context_tokens: int) -> list[int]:
    """Return the size in bytes of each layer's KV cache with a full context."""
    return [size * cache_rows(window, context_tokens) for size, window in layers]


@lru_cache(maxsize=16)
def _read_shape(
    path: str, name: str, adapters: tuple[Adapter, ...], low_bits: bool, _stamps: tuple[_FileStamps, ...]
) -> _ModelShape:
    """Return a model's properties without loading its weights. The result is cached until a file changes."""
    try:
        skeleton = read_skeleton(path, name, LoadOptions(adapters=adapters, low_bits=low_bits))
        config = language_config(skeleton.config)
        hidden, middle, block, heads = (
            int(config.get(key) or 0)
            for key in ("hidden_size", "intermediate_size", "block_ff_dim", "num_attention_heads")
        )
        model = skeleton.model
        zero_bytes = skeleton.low_bits.nbytes - skeleton.low_bits.array_bytes if skeleton.low_bits else 0
        caches: dict[tuple[int | None, bool], _CacheSizes] = {}
        weight_bytes = []
        for widened in (False, True):
            if widened:
                model.set_dtype(mlx_core().float32)
            weight_bytes.append(zero_bytes + parameter_bytes(model))
            for bits in KV_BITS.values():
                try:
                    caches[bits, widened] = _cache_sizes(model, bits)
                except (ValueError, TypeError, AttributeError):
                    if bits is None:
                        raise
        return _ModelShape(
            skeleton.sizes,
            weight_bytes,
            skeleton.vocab_size,
            hidden,
            max(middle, block),
            heads,
            list(_scans(model)),
            caches,
        )
    finally:
        # MLX modules contain reference cycles, so only the garbage collector can free them.
        gc.collect()


def _cache_sizes(model: Any, bits: int | None) -> _CacheSizes:
    caches = trace_one_token(model, bits)[1]
    layers = [(cache.bytes_per_token, cache.window) for cache in caches.attention]
    state_bytes = sum(array.nbytes for layer in caches.states for array in layer)
    return _CacheSizes(caches.bytes_by_context(), layers, state_bytes)


@lru_cache(maxsize=16)
def _layer_sizes(
    path: str,
    name: str,
    kv_bits: int | None,
    widened: bool,
    parts: int,
    _stamps: tuple[_FileStamps, ...],
) -> _LayerSizes:
    """Return the memory that each of a model's layers needs. The result is cached until a file changes.

    If each layer is sharded across several workers (`parts`), the sizes are those of one shard.

    Raises:
        CapabilityError: The layers cannot be split across machines.
    """
    try:
        skeleton = read_skeleton(path, name, LoadOptions())
        model = skeleton.model
        if parts > 1:
            shard_for_transfer(model, skeleton.config, name, ShardIndex(0, parts))
        else:
            check_separable(model, name)
        if widened:
            model.set_dtype(mlx_core().float32)
        weight_bytes = tuple(parameter_bytes(layer) for layer in LayerList(model).layers)
        return _LayerSizes(weight_bytes, _cache_sizes(model, kv_bits).layers)
    finally:
        # MLX modules contain reference cycles, so only the garbage collector can free them.
        gc.collect()


def _scans(model: Any) -> Iterator[Callable[[int], int]]:
    """Yield a function per recurrent layer that maps a token count to memory use in array elements."""
    for states in trace_one_token(model)[1].states:
        # Convolution states have shape [1, tokens, channels], with fewer tokens than channels.
        convolved = [array.shape for array in states if array.ndim == 3 and array.shape[1] < array.shape[2]]
        kernel_tokens = 1 + max((shape[1] for shape in convolved), default=0)
        heads = head_size = state_size = copies = 0
        for array in states:
            if array.ndim == 4:
                heads, head_size, state_size = array.shape[1:]
                is_mamba2 = any("A_log" in module and "D" in module for module in model.modules())
                # Recurrent layers other than Mamba 2 layers store a copy of their state for every token.
                copies = 0 if is_mamba2 else 1
            elif array.ndim == 3 and array.shape not in convolved:
                heads, head_size, state_size, copies = array.shape[1], 1, array.shape[2], _LOOPED_COPIES
        row = 2 * heads * head_size + (kernel_tokens + 6) * sum(shape[2] for shape in convolved)
        yield partial(_scan_elements, row, heads, head_size, state_size, copies)


def _scan_elements(row: int, heads: int, head_size: int, state_size: int, copies: int, rows: int) -> int:
    """Return the peak number of array elements in memory while a recurrent layer processes `rows` tokens."""
    if copies:
        return rows * (row + copies * heads * head_size * state_size)
    return rows * row + 3 * heads * max(rows * rows, state_size * (head_size + rows))
