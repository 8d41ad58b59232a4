"""The feed-forward block of a head's layers, as in Llama."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

__all__ = ["FeedForward"]


class FeedForward(Module):
    """A feed-forward block with a gate (SwiGLU, arXiv 2002.05202).

    Args:
        size: Size of hidden states.
        inner: Size of the block's inner layer.
    """

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def __call__(self, states: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))
