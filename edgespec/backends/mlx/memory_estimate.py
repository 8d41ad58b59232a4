"""Estimate the memory of MLX models from their configuration and the headers of their weight files.

MLX computes arrays only when they are needed. We therefore build the model and the graph of a pass over one
token, and read the shapes of the arrays without computing them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.base import LoadOptions
from edgespec.backends.memory_check import requested_context
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.mlx.build_info import mlx_core, runs_on_cpu
from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state
from edgespec.backends.mlx.loading import KV_BITS, MAX_WIDTH, check_options, prefill_batch_tokens
from edgespec.backends.mlx.model_skeleton import (
    ModelSkeleton,
    WeightSizes,
    parameter_bytes,
    read_skeleton,
    trace_one_token,
)
from edgespec.backends.mlx_metadata import language_config
from edgespec.errors import OptionError
from edgespec.heap import address_space_is_limited

__all__ = ["MlxMemoryEstimator"]

# Memory of the tokenizer per token (text, id and merge rule), in bytes. Measured.
_TOKEN_BYTES = 500
# Ratio of the memory that MLX allocates for a recurrent layer to the memory it uses at one time. Measured.
_ALLOCATED_AHEAD = 2
# Size of MLX's graph in bytes per token, for recurrent layers that mlx-lm computes token by token. Measured.
_GRAPH_ROW_BYTES = 8_000
# Copies of the state in memory, for recurrent layers that mlx-lm computes token by token. Measured.
_LOOPED_COPIES = 3
_KV_NAMES = {8: "q8_0", 4: "q4_0"}
_FileStamps = tuple[tuple[str, int, int], ...]


class _CacheBytes(NamedTuple):
    """Sizes of the caches in bytes when the context is full."""

    total: int
    # Keys and values of the layer where they are largest.
    largest_layer: int
    # Either the keys or the values of one layer, whichever is the largest of all layers.
    largest_side: int
    recurrent_states: int


_CacheSizes = Callable[[int], _CacheBytes]


class _RecurrentLayer(NamedTuple):
    """Dimensions of a recurrent layer. Some layers have only a convolution and no other state.

    Attributes:
        channels: Number of channels of the convolution.
        kernel_tokens: Width of the convolution in tokens.
        heads, head_size, state_size: Shape of the state.
        copies: Number of copies of the state per token; 0 if all tokens are computed at once, as in Mamba 2.
    """

    channels: int
    kernel_tokens: int
    heads: int = 0
    head_size: int = 0
    state_size: int = 0
    copies: int = 0

    def scan_elements(self, rows: int) -> int:
        """Return the maximum number of array elements in memory while computing `rows` tokens. Measured."""
        inner = self.heads * self.head_size
        if self.copies:
            states = self.copies * rows * inner * self.state_size
        else:
            states = 3 * self.heads * max(rows * rows, self.state_size * (self.head_size + rows))
        return rows * (2 * inner + (self.kernel_tokens + 6) * self.channels) + states


class _ModelShape(NamedTuple):
    """Properties of a model that its memory estimates are based on."""

    sizes: WeightSizes
    # As stored, and after widening to float32.
    weight_bytes: list[int]
    vocab_size: int
    hidden_size: int
    # Size of the feed-forward network.
    intermediate_size: int
    attention_heads: int
    recurrent_layers: list[_RecurrentLayer]
    # Functions that map a context length in tokens to the cache sizes, keyed by (bits per element, whether
    # the weights are widened). Unsupported combinations are absent.
    caches: dict[tuple[int | None, bool], _CacheSizes]


class MlxMemoryEstimator:
    """Estimator of the memory that the MLX model in a folder will use.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        BackendMissingError: mlx or mlx-lm is not installed.
    """

    layers = 0
    longrope_switch_tokens = 0

    def __init__(self, path: str, name: str, options: LoadOptions) -> None:
        self.name = name
        stamps = [_file_stamps(Path(folder)) for folder in (path, options.adapter) if folder is not None]
        self._shape = _read_shape(path, name, options.adapter, options.low_bits, tuple(stamps))
        self.trained_context_tokens: int = self._shape.sizes.trained_context_tokens

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        check_options(options)
        shape = self._shape
        tokens = requested_context(options, self.trained_context_tokens)
        widened, bits = shape.sizes.widens(options), KV_BITS[options.kv_type]
        if (bits, widened) not in shape.caches:
            raise OptionError(
                f"{self.name} does not support kv_type {options.kv_type!r}", "use --kv-type auto"
            )
        cache = shape.caches[bits, widened](tokens)
        parts = (
            MemoryPart("weights", shape.weight_bytes[widened]),
            MemoryPart("cache", cache.total),
            MemoryPart("compute", self._compute_bytes(tokens, cache, options, widened)),
            MemoryPart("vocabulary", shape.vocab_size * _TOKEN_BYTES),
        )
        kv_type = _KV_NAMES[bits] if bits else "float32" if widened else "as the weights"
        return MemoryEstimate(tokens, kv_type, parts)

    def _compute_bytes(self, tokens: int, cache: _CacheBytes, options: LoadOptions, widened: bool) -> int:
        """Return the memory of the largest pass in bytes, including a copy of a cache that grows. Measured.

        On a CPU, the new keys, the new values, the attention scores and the feed-forward network are computed
        one after another, and each is freed before the next. We count only the largest of them. On a GPU and
        under `ulimit -v`, memory counts as soon as it is allocated, so we add them up.
        """
        shape, on_cpu = self._shape, runs_on_cpu()
        counts_allocated = not on_cpu or address_space_is_limited()
        # A prefill pass computes no logits. A verify pass computes them for up to MAX_WIDTH tokens.
        prefill_tokens = prefill_batch_tokens(options)
        # Attention on a CPU stores all scores in memory. The fused attention kernels of a GPU do not.
        scores = shape.attention_heads * tokens if on_cpu and cache.largest_layer else 0
        hidden, middle, logits = 6 * shape.hidden_size, 2 * shape.intermediate_size, 2 * shape.vocab_size
        widest = max(prefill_tokens, MAX_WIDTH)
        scan = max((layer.scan_elements(widest) for layer in shape.recurrent_layers), default=0)
        if counts_allocated:
            row = hidden + middle + shape.intermediate_size + scores
            verify_row, scan = row + logits, _ALLOCATED_AHEAD * scan
        else:
            row = hidden + max(middle, scores)
            verify_row = max(row, hidden + logits)
        elements = max(prefill_tokens * row, MAX_WIDTH * verify_row, scan)
        pass_bytes = elements * (4 if widened or on_cpu else 2)
        if counts_allocated:
            pass_bytes += cache.largest_layer
        else:
            pass_bytes = max(pass_bytes, cache.largest_side)
        looped_layers = sum(layer.copies == _LOOPED_COPIES for layer in shape.recurrent_layers)
        graph_bytes = looped_layers * prefill_tokens * _GRAPH_ROW_BYTES
        # Under `ulimit -v`, freed CPU memory is reused immediately.
        freed_bytes = 0 if on_cpu and counts_allocated else freed_buffers_bytes()
        return int(pass_bytes + cache.recurrent_states + graph_bytes + freed_bytes)

    def close(self) -> None:
        release_thread_state()


def _file_stamps(folder: Path) -> _FileStamps:
    """Return the name, size and modification time of each model file, to detect changed files."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    stats = [(file.name, file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=16)
def _read_shape(
    path: str, name: str, adapter: str | None, low_bits: bool, _stamps: tuple[_FileStamps, ...]
) -> _ModelShape:
    """Return the properties of a model without loading its weights. Cached until a model file changes."""
    try:
        return _shape_of(read_skeleton(path, name, LoadOptions(adapter=adapter, low_bits=low_bits)))
    finally:
        # MLX modules have circular references, so only the garbage collector can free them.
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
        # The first pass allocates the arrays of zeros that low-bit weights share.
        zero_bytes = low_bits.nbytes - low_bits.array_bytes if low_bits else 0
        weight_bytes.append(zero_bytes + parameter_bytes(model))
        for bits in KV_BITS.values():
            try:
                caches[bits, widened] = _cache_sizes(model, bits)
            except (ValueError, TypeError, AttributeError):
                if bits is None:
                    raise
    sizes, vocab_size, recurrent = skeleton.sizes, skeleton.vocab_size, _recurrent_layers(model)
    return _ModelShape(sizes, weight_bytes, vocab_size, hidden, max(middle, block), heads, recurrent, caches)


def _recurrent_layers(model: Any) -> list[_RecurrentLayer]:
    """Infer the dimensions of a model's recurrent layers from the shapes of their states."""
    is_mamba2 = any("A_log" in module and "D" in module for module in model.modules())
    layers = []
    for states in trace_one_token(model)[1].states:
        # The state of a convolution has shape [1, tokens, channels], with fewer tokens than channels.
        convolved = [array.shape for array in states if array.ndim == 3 and array.shape[1] < array.shape[2]]
        kernel_tokens = 1 + max((shape[1] for shape in convolved), default=0)
        state: tuple[int, ...] = (0, 0, 0, 0)
        for array in states:
            if array.ndim == 4:
                state = (*array.shape[1:], 0 if is_mamba2 else 1)
            elif array.ndim == 3 and array.shape not in convolved:
                state = (array.shape[1], 1, array.shape[2], _LOOPED_COPIES)
        layers.append(_RecurrentLayer(sum(shape[2] for shape in convolved), kernel_tokens, *state))
    return layers


def _cache_sizes(model: Any, bits: int | None) -> _CacheSizes:
    """Return a function that maps a context length in tokens to the sizes of the full caches."""
    from edgespec.backends.mlx.attention_cache import cache_rows

    _, memory = trace_one_token(model, bits)
    total_bytes = memory.bytes_by_context()
    states = sum(array.nbytes for layer in memory.states for array in layer)
    layers = [(cache.side_bytes_per_token, cache.window) for cache in memory.attention]

    def sizes(tokens: int) -> _CacheBytes:
        sides = [[size * cache_rows(window, tokens) for size in both] for both, window in layers]
        largest_layer = max(map(sum, sides), default=0)
        return _CacheBytes(total_bytes(tokens), largest_layer, max(map(max, sides), default=0), states)

    return sizes
