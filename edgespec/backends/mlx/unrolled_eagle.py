"""The network of an EAGLE-3 head (arXiv 2503.01840), for training.

Its modules are named as in the heads published by SafeAILab and SpecForge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from edgespec.backends.mlx.eagle_network import EagleLayer
from edgespec.heads.eagle_config import parse_config

__all__ = ["UnrolledEagle"]


class UnrolledEagle(Module):
    """One transformer layer that reads token embeddings and hidden states of the target.

    The output matrix is not part of the network, because heads use a copy of the target's.

    Args:
        config: The `config.json` of the head.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        settings = parse_config(config, 3)
        size = settings.hidden_size
        self.fc = Linear(3 * size, size, bias=False)
        self.midlayer = EagleLayer(settings)
        self.norm = RMSNorm(size, settings.norm_eps)

    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        """Draft several tokens ahead from every token at once, as in training-time test (section 3.2).

        In the first step, row t reads the target's hidden state at token t and the embedding of token t + 1,
        and attends to all rows up to its own. In each later step, it reads its own output of the step before
        and the embedding of the next token, and also attends to its own rows of the earlier steps, just as
        when the head drafts.

        Args:
            embeddings: The target's token embeddings [conversations, tokens, size].
            hidden: The target's hidden states, of three layers, concatenated [conversations, tokens, 3 size].
            steps: Number of tokens to draft.

        Yields:
            For each step j, the head's hidden states [conversations, tokens, size]. The output matrix maps
            the state of token t to the logits of token t + 2 + j.
        """
        attention = _UnrolledAttention(hidden.shape[1])
        state = self.fc(hidden)
        for _ in range(steps):
            embeddings = mx.concatenate([embeddings[:, 1:], mx.zeros_like(embeddings[:, :1])], axis=1)
            state = self.midlayer(state, embeddings, attention)
            yield self.norm(state)


class _UnrolledAttention:
    """Attention of row t in each step to rows 0 to t of the first step, and to row t of later steps."""

    def __init__(self, length: int) -> None:
        rows = mx.arange(length)
        self._mask = mx.where(rows[None] <= rows[:, None], 0.0, -mx.inf)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Number of earlier steps. Row t of step j belongs to the token at position t + j."""
        return len(self._keys)

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        shared = queries.shape[1] // keys.shape[1]
        queries = queries * scale
        self._keys.append(mx.repeat(keys, shared, axis=1))
        self._values.append(mx.repeat(values, shared, axis=1))
        length = queries.shape[2]
        own = [(queries * key).sum(axis=-1, keepdims=True) for key in self._keys[1:]]
        scores = mx.concatenate([queries @ self._keys[0].swapaxes(-1, -2) + self._mask, *own], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        output = weights[..., :length] @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            output = output + weights[..., length + step : length + step + 1] * value
        return output
