"""Run the prefix layer of Hydra++ heads, which attends to all hidden states (arXiv 2402.05109)."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np

from edgespec.heads.cached_attention import CachedAttention, Projections
from edgespec.heads.products import Array, WeightLoader, rms_norm, silu
from edgespec.heads.residual_layout import AttentionLayer
from edgespec.heads.rope_settings import RopeSettings
from edgespec.heads.rotation import Rotation

__all__ = ["AttentionShape", "PrefixLayer"]


class AttentionShape(NamedTuple):
    """Settings of an attention layer that its weights do not determine. Hydra++ heads use the target's.

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
        attention: The layer's attention, with the KV cache.
    """

    def __init__(self, weights: AttentionLayer, shape: AttentionShape, loader: WeightLoader) -> None:
        self._epsilon = shape.norm_epsilon
        projections = map(loader.matrix, (weights.q_proj, weights.k_proj, weights.v_proj, weights.o_proj))
        self._gate, self._up, self._down = map(
            loader.matrix, (weights.gate_proj, weights.up_proj, weights.down_proj)
        )
        self._input_norm, self._inner_norm, self._norm = map(
            loader.vector, (weights.input_norm, weights.post_attention_norm, weights.norm)
        )
        head_size = weights.q_proj.shape[0] // shape.heads
        self.attention = CachedAttention(
            Projections(*projections),
            Rotation(RopeSettings(shape.rope_theta), head_size),
            shape.heads,
            weights.k_proj.shape[0] // head_size,
            head_size,
        )

    def with_own_cache(self) -> PrefixLayer:
        """Return the same layer with an empty KV cache of its own."""
        other = copy(self)
        other.attention = self.attention.with_own_cache()
        return other

    def append(self, states: Array) -> None:
        """Append the keys and values of hidden states [tokens, size] to the KV cache."""
        self.attention.append(rms_norm(states, self._input_norm, self._epsilon))

    def run(self, states: Array) -> Array:
        """Append hidden states [tokens, size] to the KV cache, and return the output [tokens, size]."""
        with np.errstate(over="ignore", invalid="ignore"):
            states = states + self.attention.run(rms_norm(states, self._input_norm, self._epsilon))
            x = rms_norm(states, self._inner_norm, self._epsilon)
            states = states + self._down(silu(self._gate(x)) * self._up(x))
            return rms_norm(states, self._norm, self._epsilon)
