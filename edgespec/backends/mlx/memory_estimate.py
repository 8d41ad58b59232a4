"""Estimate the memory use of MLX models from their configuration and weight file headers.

MLX evaluates arrays lazily, so we build the model and the graph of a one-token pass, and read the shapes of
the arrays without evaluating them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.mlx.build_info import mlx_core, runs_on_cpu, use_in_this_process
from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state, reuse_stream
from edgespec.backends.mlx.layer_placement import LayerPlacement, place_layers, place_parts, read_layer_sizes
from edgespec.backends.mlx.model_skeleton import (
    ModelSkeleton,
    WeightSizes,
    parameter_bytes,
    read_skeleton,
    trace_one_token,
)
from edgespec.backends.mlx.weight_loading import KV_BITS, MAX_WIDTH, check_options, prefill_batch_tokens
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

__all__ = ["MlxMemoryEstimator"]

# Measured size of a tokenizer, in bytes per vocabulary token.
_TOKEN_BYTES = 500
# Ratio of the memory that MLX allocates for a recurrent layer to the memory that the layer needs, measured on
# a GPU.
_ALLOCATED_AHEAD = 2
# Measured number of copies of a recurrent layer's state that mlx-lm holds while it computes the layer token
# by token.
_LOOPED_COPIES = 3
_KV_NAMES = {8: "q8_0", 4: "q4_0"}
_FileStamps = tuple[tuple[str, int, int], ...]
_CacheSizes = Callable[[int], "_CacheBytes"]


class _CacheBytes(NamedTuple):
    """Cache sizes in bytes: all layers, the largest layer, and one copy of the recurrent states."""

    total: int
    largest_layer: int
    states: int


class _ModelShape(NamedTuple):
    """Properties of a model that determine its memory use.

    Attributes:
        sizes: Sizes of the weights and the KV cache, used to decide whether to widen the weights to float32.
        weight_bytes: Size of the weights in bytes, as stored and after widening to float32.
        intermediate_size: Inner size of the feed-forward network.
        scans: A function per recurrent layer that maps a token count to the layer's memory use in array
            elements.
        caches: Functions that return cache sizes for a context length, keyed by bits per element and whether
            the weights are widened.
    """

    sizes: WeightSizes
    weight_bytes: list[int]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    scans: list[Callable[[int], int]]
    caches: dict[tuple[int | None, bool], _CacheSizes]


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
        if options.workers is not None:
            return self._estimate_local(options)
        cache = shape.caches[bits, widened](tokens)
        # Add a copy of the largest layer's cache, because caches are copied when they grow.
        compute = self._pass_bytes(tokens if cache.largest_layer else 0, options, widened)
        compute += cache.largest_layer + cache.states + freed_buffers_bytes()
        parts = (
            MemoryPart("weights", shape.weight_bytes[widened]),
            MemoryPart("cache", cache.total),
            MemoryPart("compute", compute),
            MemoryPart("vocabulary", shape.vocab_size * _TOKEN_BYTES),
        )
        return MemoryEstimate(tokens, _kv_name(bits, widened), parts)

    def _estimate_local(self, options: LoadOptions) -> MemoryEstimate:
        """Estimate the memory that the model needs on this machine when its layers are on workers."""
        shape, placed = self._shape, self.placement(options)
        tokens = requested_context(options, self.trained_context_tokens)
        weight_bytes = shape.weight_bytes[placed.widened] - placed.layer_weight_bytes
        weight_bytes += placed.local_weight_bytes
        compute = self._pass_bytes(tokens if placed.local else 0, options, placed.widened)
        compute += placed.local_cache_bytes // max(1, placed.local) + freed_buffers_bytes()
        parts = (
            MemoryPart("weights", weight_bytes),
            MemoryPart("cache", placed.local_cache_bytes),
            MemoryPart("compute", compute),
            MemoryPart("vocabulary", shape.vocab_size * _TOKEN_BYTES),
        )
        here = MachineShare(
            THIS_MACHINE,
            placed.local,
            weight_bytes,
            placed.local_cache_bytes,
            compute,
            placed.local_weight_bytes / shape.weight_bytes[placed.widened],
            has_output=True,
        )
        kv_type = _kv_name(KV_BITS[options.kv_type], placed.widened)
        return MemoryEstimate(tokens, kv_type, parts, (here, *placed.workers))

    def placement(self, options: LoadOptions) -> LayerPlacement:
        """Return which layers each machine holds, for load options with workers.

        On CPUs, 16-bit weights are widened to float32 if the machines have enough memory.

        Raises:
            MemoryBudgetError: The layers do not fit.
            CapabilityError: The layers cannot be split across machines.
        """
        assert options.workers is not None
        tokens, bits = requested_context(options, self.trained_context_tokens), KV_BITS[options.kv_type]
        for widened in (True, False) if runs_on_cpu() else (False,):
            whole = read_layer_sizes(self._path, self.name, bits, widened, 1, self._stamps)
            cache_bytes = whole.cache_bytes(tokens)
            compute = self._pass_bytes(tokens, options, widened) + max(cache_bytes) + freed_buffers_bytes()
            read_bytes = self._shape.weight_bytes[widened]
            try:
                if options.split_tensors:
                    parts = len(options.workers.links)
                    part = read_layer_sizes(self._path, self.name, bits, widened, parts, self._stamps)
                    return place_parts(
                        self.name, part, whole, tokens, options.workers, compute, read_bytes, widened=widened
                    )
                return place_layers(
                    self.name,
                    whole.weight_bytes,
                    cache_bytes,
                    options.workers,
                    compute,
                    read_bytes,
                    widened=widened,
                )
            except MemoryBudgetError:
                if not widened:
                    raise
        raise AssertionError

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


def _kv_name(bits: int | None, widened: bool) -> str:
    return _KV_NAMES[bits] if bits else "float32" if widened else "as the weights"


def _file_stamps(folder: Path) -> _FileStamps:
    """Return the name, size and modification time of each model file, to detect changes."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    stats = [(file.name, file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=16)
def _read_shape(
    path: str, name: str, adapters: tuple[Adapter, ...], low_bits: bool, _stamps: tuple[_FileStamps, ...]
) -> _ModelShape:
    """Return a model's properties without loading its weights. The result is cached until a file changes."""
    try:
        return _shape_of(read_skeleton(path, name, LoadOptions(adapters=adapters, low_bits=low_bits)))
    finally:
        # MLX modules contain reference cycles, so only the garbage collector can free them.
        gc.collect()


def _shape_of(skeleton: ModelSkeleton) -> _ModelShape:
    config = language_config(skeleton.config)
    hidden, middle, block, heads = (
        int(config.get(key) or 0)
        for key in ("hidden_size", "intermediate_size", "block_ff_dim", "num_attention_heads")
    )
    model, low_bits = skeleton.model, skeleton.low_bits
    caches: dict[tuple[int | None, bool], _CacheSizes] = {}
    weight_bytes = []
    for widened in (False, True):
        if widened:
            model.set_dtype(mlx_core().float32)
        zero_bytes = low_bits.nbytes - low_bits.array_bytes if low_bits else 0
        weight_bytes.append(zero_bytes + parameter_bytes(model))
        for bits in KV_BITS.values():
            try:
                caches[bits, widened] = _cache_sizes(model, bits)
            except (ValueError, TypeError, AttributeError):
                if bits is None:
                    raise
    sizes, vocab_size, scans = skeleton.sizes, skeleton.vocab_size, list(_scans(model))
    return _ModelShape(sizes, weight_bytes, vocab_size, hidden, max(middle, block), heads, scans, caches)


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


def _cache_sizes(model: Any, bits: int | None) -> _CacheSizes:
    from edgespec.backends.mlx.attention_cache import cache_rows

    _, memory = trace_one_token(model, bits)
    total_bytes = memory.bytes_by_context()
    states = sum(array.nbytes for layer in memory.states for array in layer)
    layers = [(cache.bytes_per_token, cache.window) for cache in memory.attention]

    def sizes(tokens: int) -> _CacheBytes:
        largest = max((layer * cache_rows(window, tokens) for layer, window in layers), default=0)
        return _CacheBytes(total_bytes(tokens), largest, states)

    return sizes
