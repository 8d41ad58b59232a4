"""Run the prefix layer of Hydra++ heads, which attends to all hidden states (arXiv 2402.05109)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgespec.heads.products import Array, WeightLoader, rms_norm, silu
from edgespec.heads.residual_layout import AttentionLayer

__all__ = ["AttentionShape", "PrefixLayer"]

# Grow the KV cache by at least this many tokens, so that it is not copied for every append.
_MIN_GROWTH_TOKENS = 256


class AttentionShape(NamedTuple):
    """Settings of an attention layer that do not follow from its weights. Hydra++ heads use the target's.

    Attributes:
        heads: Number of query heads. Multiple query heads can share a key head.
        rope_theta: Base of the rotary position embedding.
        norm_epsilon: Epsilon of the RMS norms.
    """

    heads: int
    rope_theta: float
    norm_epsilon: float


class PrefixLayer:
    """A Llama transformer layer with a final norm and a KV cache.

    Args:
        weights: The layer's weights.
        shape: The layer's settings.
        loader: Reads the weights.

    Raises:
        ModelFileError: The weights cannot be read, or contain infinite values or NaN.

    Attributes:
        start: Position of the first token in the KV cache.
        end: Position after the last token in the KV cache.
    """

    def __init__(self, weights: AttentionLayer, shape: AttentionShape, loader: WeightLoader) -> None:
        self.start = self.end = 0
        self._shape = shape
        self._q, self._k, self._v, self._o, self._gate, self._up, self._down = map(
            loader.matrix,
            (
                weights.q_proj, weights.k_proj, weights.v_proj, weights.o_proj,
                weights.gate_proj, weights.up_proj, weights.down_proj,
            ),
        )  # fmt: skip
        self._input_norm, self._inner_norm, self._norm = map(
            loader.vector, (weights.input_norm, weights.post_attention_norm, weights.norm)
        )
        self._head_size = head_size = weights.q_proj.shape[0] // shape.heads
        self._kv_heads = weights.k_proj.shape[0] // head_size
        self._frequencies = shape.rope_theta ** (-np.arange(0, head_size, 2) / head_size)
        # Keys and values [2, kv heads, tokens, head size].
        self._cache: Array = np.empty((2, self._kv_heads, 0, head_size), np.float32)

    def restart(self, position: int) -> None:
        """Empty the KV cache. The next hidden state is at `position`."""
        self.start = self.end = position

    def truncate(self, end: int) -> None:
        """Remove the keys and values at position `end` and after."""
        self.end = min(self.end, end)
        self.start = min(self.start, self.end)

    def copy(self, start: int, end: int) -> bytes:
        """Return a copy of the keys and values at positions [start, end), for `restore`."""
        return self._cache[:, :, start - self.start : end - self.start].tobytes()

    def restore(self, tokens: int, data: bytes) -> bool:
        """Append the copied keys and values of `tokens` tokens. Return False if `data` has another size."""
        shape = (2, self._kv_heads, tokens, self._head_size)
        values = np.frombuffer(data, np.float32) if len(data) % 4 == 0 else np.empty(0, np.float32)
        if values.size != np.prod(shape):
            return False
        used = self.end - self.start
        self._reserve(used + tokens)
        self._cache[:, :, used : used + tokens] = values.reshape(shape)
        self.end += tokens
        return True

    def append(self, states: Array) -> None:
        """Append the keys and values of hidden states [tokens, size] to the KV cache."""
        self._append(rms_norm(states, self._input_norm, self._shape.norm_epsilon))

    def run(self, states: Array) -> Array:
        """Append hidden states [tokens, size] to the KV cache, and return the output [tokens, size]."""
        epsilon = self._shape.norm_epsilon
        with np.errstate(over="ignore", invalid="ignore"):
            x = rms_norm(states, self._input_norm, epsilon)
            self._append(x)
            states = states + self._o(self._attention(self._q(x)))
            x = rms_norm(states, self._inner_norm, epsilon)
            states = states + self._down(silu(self._gate(x)) * self._up(x))
            return rms_norm(states, self._norm, epsilon)

    def _append(self, x: Array) -> None:
        used, count = self.end - self.start, len(x)
        self._reserve(used + count)
        self._cache[0, :, used : used + count] = self._rotated(self._heads(self._k(x)), self.end)
        self._cache[1, :, used : used + count] = self._heads(self._v(x))
        self.end += count

    def _reserve(self, tokens: int) -> None:
        """Make room for the keys and values of this many tokens."""
        used = self.end - self.start
        if tokens > self._cache.shape[2]:
            grown = max(tokens, used * 3 // 2, used + _MIN_GROWTH_TOKENS)
            cache = np.empty((*self._cache.shape[:2], grown, self._head_size), np.float32)
            cache[:, :, :used] = self._cache[:, :, :used]
            self._cache = cache

    def _heads(self, rows: Array) -> Array:
        """Split rows [tokens, heads * head size] into heads, and return [heads, tokens, head size]."""
        return rows.reshape(len(rows), -1, self._head_size).swapaxes(0, 1)

    def _rotated(self, heads: Array, position: int) -> Array:
        """Apply the rotary position embedding to [heads, tokens, head size]."""
        angles = np.outer(np.arange(position, position + heads.shape[1]), self._frequencies)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = np.split(heads, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _attention(self, queries: Array) -> Array:
        """Return the attention output for the queries [tokens, size] of the last cached tokens."""
        count, used = len(queries), self.end - self.start
        keys, values = self._cache[:, :, :used]
        queries = self._rotated(self._heads(queries), self.end - count)
        # Stack the queries of all heads that share a key head, so that one product serves them all.
        stacked = queries.reshape(self._kv_heads, -1, self._head_size)
        scores = stacked @ keys.swapaxes(1, 2) / np.float32(np.sqrt(self._head_size))
        hidden = np.arange(used) > np.arange(used - count, used)[:, None]
        scores = np.where(np.tile(hidden, (stacked.shape[1] // count, 1)), np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        return mixed.reshape(self._shape.heads, count, -1).swapaxes(0, 1).reshape(count, -1)
