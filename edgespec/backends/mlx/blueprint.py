"""What an MLX model takes in memory, from its configuration and the headers of its weights.

MLX computes nothing before it is asked to: the model is put together, one token is passed through it, and
only the sizes of what would come out are looked at.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.backends.base import LoadOptions
from edgespec.backends.footprint import Footprint, Part
from edgespec.backends.mlx.about import core
from edgespec.backends.mlx.device import leave_thread
from edgespec.backends.mlx.files import outline_of
from edgespec.backends.mlx.loading import KV_BITS, check_options
from edgespec.backends.room import context_wanted

__all__ = ["MlxBlueprint"]

# A wide pass that verifies; prefill gives no logits.
_VERIFIED_ROWS = 32
_KV_NAMES = {8: "q8_0", 4: "q4_0"}


class MlxBlueprint:
    """The metadata of the MLX model in a folder. Raises what loading it would: see `open_checkpoint`."""

    layers = 0

    def __init__(self, path: str, name: str, options: LoadOptions) -> None:
        self.name = name
        self._outline = outline_of(path, name, replace(options, memory_bytes=None))
        self.trained_context_tokens: int = self._outline.trained_context_tokens

    def footprint(self, options: LoadOptions) -> Footprint:
        """See `Blueprint`. Where the processor computes, halves become float32 if that fits."""
        check_options(options)
        outline = self._outline
        tokens = context_wanted(options, self.trained_context_tokens)
        widened = outline.widens(options)
        bits = KV_BITS[options.kv_type]
        cache = self._cache_bytes(tokens, bits, widened)
        parts = (
            Part("weights", outline.held_bytes(widened) + outline.zero_bytes),
            Part("cache", cache),
            Part("compute", self._compute_bytes(tokens, options, widened)),
        )
        kind = _KV_NAMES[bits] if bits else "float32" if widened else "as the weights"
        return Footprint(tokens, kind, parts)

    def _cache_bytes(self, tokens: int, bits: int | None, widened: bool) -> int:
        """The caches of a full context, and the states beside them."""
        from edgespec.backends.mlx.memory import Memory
        from edgespec.backends.mlx.shape import PassShape

        mx = core()
        memory = Memory(self._outline.model, PassShape(), bits)
        self._outline.model(mx.array([[0]]), cache=memory.layers)
        full = memory.sizes()(tokens)
        kept = [array.dtype for cache in memory.attention for array in cache.state]
        narrow = any(dtype in (mx.float16, mx.bfloat16) for dtype in kept)
        return full * 2 if widened and bits is None and narrow else full

    def _compute_bytes(self, tokens: int, options: LoadOptions, widened: bool) -> int:
        """What the widest pass computes in: logits, the middle of a layer, and the scores of attention."""
        from edgespec.backends.mlx.model import CPU_BATCH_TOKENS

        mx = core()
        config = {**self._outline.config, **(self._outline.config.get("text_config") or {})}
        on_cpu = mx.default_device() == mx.cpu
        rows = min(options.batch_tokens, CPU_BATCH_TOKENS) if on_cpu else options.batch_tokens
        hidden, middle, heads = (
            int(config.get(key) or 0) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        # A processor writes all scores down; the kernels of a graphics processor do not. Measured.
        row = 6 * hidden + 3 * middle + (2 * heads * tokens if on_cpu else 0)
        logits = 2 * self._outline.vocab_size
        return max(rows * row, _VERIFIED_ROWS * (row + logits)) * (4 if widened or on_cpu else 2)

    def close(self) -> None:
        """See `Blueprint`."""
        leave_thread()
