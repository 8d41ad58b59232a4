"""Run the layer of EAGLE-1 and EAGLE-2 heads with NumPy (arXiv 2401.15077 and 2406.16858)."""

from __future__ import annotations

from copy import copy

import numpy as np

from edgespec.heads.cached_attention import CachedAttention, Projections, TreeNodes
from edgespec.heads.eagle_files import EagleFiles
from edgespec.heads.products import Array, Product, WeightLoader, rms_norm, silu
from edgespec.heads.rotation import Rotation

__all__ = ["Eagle1Network"]


class Eagle1Network:
    """A transformer layer whose inputs are a token's embedding and the preceding hidden state.

    The layer has no norm before its attention and no final norm. EAGLE-1 and EAGLE-2 heads have the same
    layer.

    Args:
        files: The head's configuration and tensors.
        loader: Loads the head's weights.

    Raises:
        ModelFileError: The weights are unreadable, or contain infinite values or NaN.
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing, invalid or not supported.

    Attributes:
        attention: The layer's attention, with the KV cache.
    """

    def __init__(self, files: EagleFiles, loader: WeightLoader) -> None:
        config, tensors = files.config, files.tensors

        def linear(name: str) -> Product:
            return loader.linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        rotation = Rotation(config.rope, config.head_size)
        self._fc = linear("fc")
        self._gate, self._up, self._down = (
            linear(f"layer.mlp.{name}_proj") for name in ("gate", "up", "down")
        )
        self._norm = loader.vector(tensors["layer.post_attention_layernorm.weight"])
        self._epsilon = config.norm_eps
        self.attention = CachedAttention(
            Projections(*(linear(f"layer.self_attn.{name}_proj") for name in "qkvo")),
            rotation,
            config.heads,
            config.kv_heads,
            config.head_size,
        )

    def with_own_cache(self) -> Eagle1Network:
        """Return the same network with an empty KV cache of its own."""
        other = copy(self)
        other.attention = self.attention.with_own_cache()
        return other

    def append(self, embeddings: Array, states: Array) -> None:
        """Append tokens to the KV cache, without computing their hidden states. See `run`."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.attention.append(self._fused(embeddings, states))

    def run(self, embeddings: Array, states: Array, nodes: TreeNodes | None = None) -> Array:
        """Append tokens to the KV cache, and return the head's hidden states [tokens, size].

        Args:
            embeddings: The embedding of each token [tokens, size].
            states: For each token, the hidden state of the preceding token [tokens, size].
            nodes: The tokens' nodes in a draft tree. None if they follow the last token in the cache.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            states = self._fused(embeddings, states)
            states = states + self.attention.run(states, nodes)
            x = rms_norm(states, self._norm, self._epsilon)
            return states + self._down(silu(self._gate(x)) * self._up(x))

    def _fused(self, embeddings: Array, states: Array) -> Array:
        return self._fc(np.concatenate([embeddings, states], axis=1))
