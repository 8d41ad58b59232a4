"""Estimate the memory of MLX models from their configuration and the headers of their weight files.

MLX computes arrays only when they are needed. We therefore build the model and the graph of a pass over one
token, and read the shapes of the arrays without computing them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.base import LoadOptions
from edgespec.backends.memory_check import requested_context
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.mlx.build_info import mlx_core
from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state
from edgespec.backends.mlx.loading import KV_BITS, MAX_WIDTH, check_options
from edgespec.backends.mlx.model_skeleton import ModelSkeleton, WeightSizes, read_skeleton
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
_CacheSizes = Callable[[int], "_CacheBytes"]


class _CacheBytes(NamedTuple):
    """Sizes of the caches in bytes when the context is full.

    Attributes:
        total: Size of the caches of all layers.
        largest_layer: Size of the keys and values in the layer where they are largest.
        largest_side: Size of the keys or the values of one layer, whichever is the largest of all layers.
        states: Size of the recurrent states of one sequence.
    """

    total: int
    largest_layer: int
    largest_side: int
    states: int


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


@dataclass(frozen=True, slots=True)
class _ModelShape:
    """Properties of a model that its memory estimates are based on.

    Attributes:
        sizes: Sizes used to decide whether to widen weights to float32.
        weight_bytes: Size of the weights as stored, and after widening to float32, in bytes.
        zero_bytes: Size of the zero arrays that are allocated but not stored in the files, in bytes.
        vocab_size: Number of tokens in the vocabulary.
        hidden_size, intermediate_size: Size of the hidden states, and of the feed-forward network.
        heads: Number of attention heads.
        recurrent_layers: Dimensions of the recurrent layers.
        caches: Functions that return the cache sizes, keyed by (bits, widened). Unsupported combinations are
            absent.
    """

    sizes: WeightSizes
    weight_bytes: tuple[int, int]
    zero_bytes: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    recurrent_layers: tuple[_RecurrentLayer, ...]
    caches: dict[tuple[int | None, bool], _CacheSizes]


class MlxMemoryEstimator:
    """Estimator of the memory that the MLX model in a folder will use.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The weights do not fit in memory.
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
        """Estimate the memory; see `MemoryEstimator`. A CPU widens 16-bit weights to float32 if they fit."""
        check_options(options)
        shape = self._shape
        tokens = requested_context(options, self.trained_context_tokens)
        widened = shape.sizes.widens(options)
        bits = KV_BITS[options.kv_type]
        if (bits, widened) not in shape.caches:
            raise OptionError(
                f"{self.name} does not support kv_type {options.kv_type!r}", "use --kv-type auto"
            )
        cache = shape.caches[bits, widened](tokens)
        parts = (
            MemoryPart("weights", shape.weight_bytes[widened] + shape.zero_bytes),
            MemoryPart("cache", cache.total),
            MemoryPart("compute", self._compute_bytes(tokens, cache, options, widened)),
            MemoryPart("vocabulary", shape.vocab_size * _TOKEN_BYTES),
        )
        kv_type = _KV_NAMES[bits] if bits else "float32" if widened else "as the weights"
        return MemoryEstimate(tokens, kv_type, parts)

    def _rows(self, options: LoadOptions) -> int:
        """Return the maximum number of tokens in a prefill pass."""
        from edgespec.backends.mlx.model import CPU_BATCH_TOKENS

        return min(options.batch_tokens, CPU_BATCH_TOKENS) if _runs_on_cpu() else options.batch_tokens

    def _compute_bytes(self, tokens: int, cache: _CacheBytes, options: LoadOptions, widened: bool) -> int:
        """Return the memory of the largest pass in bytes, including a copy of a cache that grows. Measured.

        On a CPU, the new keys, the new values and the attention scores are computed one after another, and
        each is freed before the next. We count only the largest of them. On a GPU and under `ulimit -v`,
        memory counts as soon as it is allocated, so we add a copy of the largest layer's cache.
        """
        on_cpu = _runs_on_cpu()
        counts_touched = on_cpu and not address_space_is_limited()
        pass_bytes = self._pass_bytes(tokens if cache.largest_layer else 0, options, widened, counts_touched)
        looped_layers = sum(layer.copies == _LOOPED_COPIES for layer in self._shape.recurrent_layers)
        graph_bytes = looped_layers * self._rows(options) * _GRAPH_ROW_BYTES
        if counts_touched:
            pass_bytes = max(pass_bytes, cache.largest_side)
        else:
            pass_bytes += cache.largest_layer
        # Under `ulimit -v`, freed CPU memory is reused immediately.
        freed_bytes = 0 if on_cpu and not counts_touched else freed_buffers_bytes()
        return pass_bytes + cache.states + graph_bytes + freed_bytes

    def _pass_bytes(self, tokens: int, options: LoadOptions, widened: bool, counts_touched: bool) -> int:
        """Return the memory of one pass in bytes.

        It includes the logits, the feed-forward network, the attention scores and the recurrent layers.

        Args:
            tokens: Context length that the attention scores cover.
            options: The load options.
            widened: Whether the weights are widened to float32.
            counts_touched: Whether to count only memory that is used at one time, not all allocated memory.
        """
        shape, on_cpu = self._shape, _runs_on_cpu()
        rows = self._rows(options)
        # Attention on a CPU stores all scores in memory. The fused attention kernels of a GPU do not.
        scores = shape.heads * tokens if on_cpu else 0
        hidden, middle, logits = 6 * shape.hidden_size, 2 * shape.intermediate_size, 2 * shape.vocab_size
        scan = max((layer.scan_elements(max(rows, MAX_WIDTH)) for layer in shape.recurrent_layers), default=0)
        # A prefill pass computes no logits. A verify pass computes them for up to MAX_WIDTH tokens.
        if counts_touched:
            row = hidden + max(middle, scores)
            elements = max(rows * row, MAX_WIDTH * max(row, hidden + logits), scan)
        else:
            row = hidden + middle + shape.intermediate_size + scores
            elements = max(rows * row, MAX_WIDTH * (row + logits), _ALLOCATED_AHEAD * scan)
        return elements * (4 if widened or on_cpu else 2)

    def close(self) -> None:
        """Free the per-thread state of MLX; see `MemoryEstimator`."""
        release_thread_state()


def _runs_on_cpu() -> bool:
    return bool(mlx_core().default_device() == mlx_core().cpu)


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
        skeleton = read_skeleton(path, name, LoadOptions(adapter=adapter, low_bits=low_bits))
        return _shape_of(skeleton)
    finally:
        # MLX modules have circular references, so only the garbage collector can free them.
        gc.collect()


def _shape_of(skeleton: ModelSkeleton) -> _ModelShape:
    mx = mlx_core()
    config = {**skeleton.config, **(skeleton.config.get("text_config") or {})}
    hidden, middle, heads = (
        int(config.get(key) or 0) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    weight_bytes = (skeleton.held_bytes(False), skeleton.held_bytes(True))
    caches: dict[tuple[int | None, bool], _CacheSizes] = {}
    for widened in (False, True):
        if widened:
            skeleton.model.set_dtype(mx.float32)
        for bits in KV_BITS.values():
            try:
                caches[bits, widened] = _cache_sizes(skeleton.model, bits)
            except (ValueError, TypeError, AttributeError):
                if bits is None:
                    raise
    return _ModelShape(
        skeleton.sizes,
        weight_bytes,
        skeleton.zero_bytes,
        skeleton.vocab_size,
        hidden,
        max(middle, int(config.get("block_ff_dim") or 0)),
        heads,
        _recurrent_layers(skeleton.model),
        caches,
    )


def _recurrent_layers(model: Any) -> tuple[_RecurrentLayer, ...]:
    """Infer the dimensions of a model's recurrent layers from the shapes of their states."""
    layers = []
    for states in _memory_of_one_token(model, None).states:
        # The state of a convolution has shape [1, tokens, channels], with fewer tokens than channels.
        convolved = [array.shape for array in states if array.ndim == 3 and array.shape[1] < array.shape[2]]
        kernel_tokens = 1 + max((shape[1] for shape in convolved), default=0)
        state = (0, 0, 0, 0)
        for array in states:
            if array.ndim == 4:
                is_mamba2 = any("A_log" in module and "D" in module for module in model.modules())
                state = (*array.shape[1:], 0 if is_mamba2 else 1)
            elif array.ndim == 3 and array.shape not in convolved:
                state = (array.shape[1], 1, array.shape[2], _LOOPED_COPIES)
        layers.append(_RecurrentLayer(sum(shape[2] for shape in convolved), kernel_tokens, *state))
    return tuple(layers)


def _cache_sizes(model: Any, bits: int | None) -> _CacheSizes:
    """Return a function that maps a context length in tokens to the sizes of the full caches."""
    from edgespec.backends.mlx.attention_cache import cache_rows

    memory = _memory_of_one_token(model, bits)
    total_bytes = memory.bytes_by_context()
    states = sum(array.nbytes for layer in memory.states for array in layer)
    layers = [(cache.bytes_per_token, cache.side_bytes_per_token, cache.window) for cache in memory.attention]

    def sizes(tokens: int) -> _CacheBytes:
        rows = [(layer, side, cache_rows(window, tokens)) for layer, side, window in layers]
        largest_layer = max((layer * count for layer, _, count in rows), default=0)
        largest_side = max((side * count for _, side, count in rows), default=0)
        return _CacheBytes(total_bytes(tokens), largest_layer, largest_side, states)

    return sizes


def _memory_of_one_token(model: Any, bits: int | None) -> Any:
    """Build the graph of a pass over one token, and return the model's caches without evaluating them."""
    from edgespec.backends.mlx.layer_caches import LayerCaches
    from edgespec.backends.mlx.pass_layout import PassLayout

    memory = LayerCaches(model, PassLayout(), bits)
    model(mlx_core().array([[0]]), cache=memory.layers)
    return memory
