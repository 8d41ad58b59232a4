"""What an MLX model takes in memory, from its configuration and the headers of its weights.

MLX computes nothing before it is asked to: the model is put together, one token is passed through it, and
only the sizes of what would come out are looked at.
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
from edgespec.backends.memory_estimate import MemoryEstimate, Part
from edgespec.backends.mlx.build_info import mlx_core
from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state
from edgespec.backends.mlx.loading import KV_BITS, MAX_WIDTH, check_options
from edgespec.backends.mlx.model_skeleton import ModelSkeleton, WeightSizes, read_skeleton
from edgespec.errors import OptionError
from edgespec.heap import address_space_is_limited, retained_bytes

__all__ = ["MlxMemoryEstimator"]

# A token as text, its number by its text, and what it is merged from: measured.
_TOKEN_BYTES = 500
# Where states are computed, so many times what is written to at one time is made. Measured.
_MADE_AHEAD = 2
# Where states are made row by row, notes on what is to be computed, for each row of such a layer. Measured.
_NOTES_BYTES = 8_000
# Of such a state as many copies are there at one time. Measured.
_LOOPED_COPIES = 3
_KV_NAMES = {8: "q8_0", 4: "q4_0"}
_Stamp = tuple[tuple[str, int, int], ...]
_CacheSizes = Callable[[int], "_CacheBytes"]


class _CacheBytes(NamedTuple):
    """Bytes of a full context. layer: of its largest layer; side: of its largest keys, or values.

    states: what recurs, once.
    """

    whole: int
    layer: int
    side: int
    states: int


class _Scan(NamedTuple):
    """A layer whose state recurs: what it convolves, over so many tokens, and the shape of its state.

    Without a state it only convolves. copies: of its state that are made for each row.
    """

    convolved: int
    tokens: int
    heads: int = 0
    head_size: int = 0
    state_size: int = 0
    copies: int = 0

    def elements(self, rows: int) -> int:
        """What a processor writes to for so many rows, of buffers that are there at one time. Measured.

        Rows of the layer before are only then made of its state.
        """
        inner = self.heads * self.head_size
        projected = rows * (inner + self.convolved + self.heads)
        convolving = (self.tokens + 4.5) * rows * self.convolved
        decays, states = self.heads * rows * rows, self.heads * self.state_size * (self.head_size + rows)
        if self.copies:
            decays, made = 0, self.copies * rows * inner * self.state_size
        else:
            made = int(2.5 * max(decays, states))
        before = projected + rows * self.convolved + decays
        scanning = rows * (self.convolved + inner) + made
        return int(before + projected + max(convolving, scanning))


@dataclass(frozen=True, slots=True)
class _Figures:
    """All that is asked about a model, so that it need not be put together twice.

    held_bytes: of the weights as they are, and widened to float32. caches: by bits, and as widened, bytes of
    a full context of so many tokens; without those that cannot be. hidden, middle: elements of one row
    between layers, and within them; heads: whose scores a processor writes down. scans: of layers that
    recur.
    """

    sizes: WeightSizes
    held_bytes: tuple[int, int]
    zero_bytes: int
    vocab_size: int
    hidden: int
    middle: int
    heads: int
    scans: tuple[_Scan, ...]
    caches: dict[tuple[int | None, bool], _CacheSizes]


class MlxMemoryEstimator:
    """The metadata of the MLX model in a folder. Raises what loading it would: see `load_model`."""

    layers = 0
    longrope_switch_tokens = 0

    def __init__(self, path: str, name: str, options: LoadOptions) -> None:
        self.name = name
        stamps = [_stamp(Path(folder)) for folder in (path, options.adapter) if folder is not None]
        self._figures = _figures(path, name, options.adapter, options.low_bits, tuple(stamps))
        self.trained_context_tokens: int = self._figures.sizes.trained_context_tokens

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """See `MemoryEstimator`. Where the processor computes, halves become float32 if that fits."""
        check_options(options)
        figures = self._figures
        tokens = requested_context(options, self.trained_context_tokens)
        widened = figures.sizes.widens(options)
        bits = KV_BITS[options.kv_type]
        if (bits, widened) not in figures.caches:
            raise OptionError(
                f"{self.name} does not run with kv_type {options.kv_type!r}", "use --kv-type auto"
            )
        cache = figures.caches[bits, widened](tokens)
        parts = (
            Part("weights", figures.held_bytes[widened] + figures.zero_bytes),
            Part("cache", cache.whole),
            Part("compute", self._compute_bytes(tokens, cache, options, widened)),
            Part("vocabulary", figures.vocab_size * _TOKEN_BYTES),
            Part("heap", retained_bytes() + self._notes_bytes(options)),
        )
        kind = _KV_NAMES[bits] if bits else "float32" if widened else "as the weights"
        return MemoryEstimate(tokens, kind, parts)

    def _notes_bytes(self, options: LoadOptions) -> int:
        """What MLX notes of a pass before it computes it, where that is much: in loops over the rows."""
        looped = sum(scan.copies == _LOOPED_COPIES for scan in self._figures.scans)
        return looped * self._rows(options) * _NOTES_BYTES

    def _rows(self, options: LoadOptions) -> int:
        """Of the widest pass that reads."""
        from edgespec.backends.mlx.model import CPU_BATCH_TOKENS

        on_cpu = mlx_core().default_device() == mlx_core().cpu
        return min(options.batch_tokens, CPU_BATCH_TOKENS) if on_cpu else options.batch_tokens

    def _compute_bytes(self, tokens: int, cache: _CacheBytes, options: LoadOptions, widened: bool) -> int:
        """What the widest pass computes in, and what of a cache is there twice while it grows. Measured.

        MLX makes buffers well before it writes to them: where those count, as addresses or on a graphics
        processor, a layer is there twice beside the scores. A processor writes to the new keys and lets go
        of the old ones, then to the values, and only then to scores. States are never written into.
        """
        on_cpu = mlx_core().default_device() == mlx_core().cpu
        touched = on_cpu and not address_space_is_limited()
        pass_bytes = self._pass_bytes(tokens if cache.layer else 0, options, widened, touched)
        if touched:
            return max(pass_bytes, cache.side) + cache.states + freed_buffers_bytes()
        # The addresses of what little is kept of freed buffers for a processor are used again at once.
        return pass_bytes + cache.layer + cache.states + (0 if on_cpu else freed_buffers_bytes())

    def _pass_bytes(self, tokens: int, options: LoadOptions, widened: bool, touched: bool) -> int:
        """Logits, the middle of a layer, the scores of so many tokens, and what states are made of.

        touched: one after another, as a processor writes to them, and not all that is made ahead.
        """
        figures, on_cpu = self._figures, mlx_core().default_device() == mlx_core().cpu
        rows = self._rows(options)
        # A processor writes all scores down; the kernels of a graphics processor do not.
        scores = figures.heads * tokens if on_cpu else 0
        hidden, middle, logits = 6 * figures.hidden, 2 * figures.middle, 2 * figures.vocab_size
        scan = max((layer.elements(max(rows, MAX_WIDTH)) for layer in figures.scans), default=0)
        # Prefill gives no logits.
        if touched:
            row = hidden + max(middle, scores)
            most = max(rows * row, MAX_WIDTH * max(row, hidden + logits), scan)
        else:
            row = hidden + middle + figures.middle + scores
            most = max(rows * row, MAX_WIDTH * (row + logits), _MADE_AHEAD * scan)
        return most * (4 if widened or on_cpu else 2)

    def close(self) -> None:
        """See `MemoryEstimator`."""
        release_thread_state()


def _stamp(folder: Path) -> _Stamp:
    """What tells files of a folder from others of the same names."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    stats = [(file.name, file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=16)
def _figures(
    path: str,
    name: str,
    adapter: str | None,
    low_bits: bool,
    _stamps: tuple[_Stamp, ...],
) -> _Figures:
    try:
        outline = read_skeleton(path, name, LoadOptions(adapter=adapter, low_bits=low_bits))
        return _figures_of(outline)
    finally:
        # Modules hold one another: without this they would stay beside the model that is loaded next.
        gc.collect()


def _figures_of(outline: ModelSkeleton) -> _Figures:
    mx = mlx_core()
    config = {**outline.config, **(outline.config.get("text_config") or {})}
    hidden, middle, heads = (
        int(config.get(key) or 0) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    held_bytes = (outline.held_bytes(False), outline.held_bytes(True))
    caches: dict[tuple[int | None, bool], _CacheSizes] = {}
    for widened in (False, True):
        if widened:
            outline.model.set_dtype(mx.float32)
        for bits in KV_BITS.values():
            try:
                caches[bits, widened] = _caches(outline.model, bits)
            except (ValueError, TypeError, AttributeError):
                if bits is None:
                    raise
    middle = max(middle, int(config.get("block_ff_dim") or 0))
    return _Figures(
        outline.sizes,
        held_bytes,
        outline.zero_bytes,
        outline.vocab_size,
        hidden,
        middle,
        heads,
        _scans(outline.model),
        caches,
    )


def _scans(model: Any) -> tuple[_Scan, ...]:
    """The layers that recur, from the shapes of their states."""
    scans = []
    for layer in _begun(model, None).states:
        # Of few rows, and of all channels.
        convolved = [array.shape for array in layer if array.ndim == 3 and array.shape[1] < array.shape[2]]
        tokens = max((shape[1] for shape in convolved), default=0)
        of_state = (0, 0, 0, 0)
        for array in layer:
            if array.ndim == 4:
                # Mamba 2 makes all rows at once.
                at_once = any("A_log" in module and "D" in module for module in model.modules())
                of_state = (*array.shape[1:], 0 if at_once else 1)
            elif array.ndim == 3 and array.shape not in convolved:
                of_state = (array.shape[1], 1, array.shape[2], _LOOPED_COPIES)
        heads, head_size, state_size, copies = of_state
        channels = sum(shape[2] for shape in convolved)
        scans.append(_Scan(channels, tokens + 1, heads, head_size, state_size, copies))
    return tuple(scans)


def _caches(model: Any, bits: int | None) -> _CacheSizes:
    """What the caches take, and the states beside them, when a context of so many tokens is full."""
    from edgespec.backends.mlx.attention_cache import cache_rows

    memory = _begun(model, bits)
    whole = memory.bytes_by_context()
    states = sum(array.nbytes for layer in memory.states for array in layer)
    layers = [(cache.bytes_per_token, cache.side_bytes_per_token, cache.window) for cache in memory.attention]

    def sizes(tokens: int) -> _CacheBytes:
        rows = [(layer, side, cache_rows(window, tokens)) for layer, side, window in layers]
        largest = max((layer * many for layer, _, many in rows), default=0)
        side = max((side * many for _, side, many in rows), default=0)
        return _CacheBytes(whole(tokens), largest, side, states)

    return sizes


def _begun(model: Any, bits: int | None) -> Any:
    """The `LayerCaches` of a model after one token, of which nothing is computed."""
    from edgespec.backends.mlx.layer_caches import LayerCaches
    from edgespec.backends.mlx.pass_layout import PassLayout

    memory = LayerCaches(model, PassLayout(), bits)
    model(mlx_core().array([[0]]), cache=memory.layers)
    return memory
