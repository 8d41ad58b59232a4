"""The network of an EAGLE-3 head (arXiv 2503.01840), for training.

Its modules are named as in the heads published by SafeAILab and SpecForge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

__all__ = ["EagleNet"]


class EagleNet(Module):
    """One transformer layer that reads token embeddings and hidden states of the target.

    The output matrix is not part of the network, because heads use a copy of the target's.

    Args:
        config: The `config.json` of the head.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = Linear(3 * size, size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(size, eps)

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
        for step in range(steps):
            embeddings = mx.concatenate([embeddings[:, 1:], mx.zeros_like(embeddings[:, :1])], axis=1)
            state = self.midlayer(embeddings, state, attention, step)
            yield self.norm(state)


class _UnrolledAttention:
    """Attend from each row to the first step's rows up to it, and to the same row of all later steps."""

    def __init__(self, length: int) -> None:
        rows = mx.arange(length)
        self._mask = mx.where(rows[None] <= rows[:, None], 0.0, -mx.inf)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend from the rows of one step. All arrays are [conversations, heads, tokens, head size]."""
        self._keys.append(keys)
        self._values.append(values)
        length = queries.shape[2]
        own = [(queries * key).sum(axis=-1, keepdims=True) for key in self._keys[1:]]
        scores = mx.concatenate([queries @ self._keys[0].swapaxes(-1, -2) + self._mask, *own], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        output = weights[..., :length] @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            output = output + weights[..., length + step : length + step + 1] * value
        return output


class _Attention(Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head_size, self._rope_base = config["head_dim"], float(config["rope_theta"])
        self.q_proj = Linear(2 * size, self._heads * self._head_size, bias=False)
        self.k_proj = Linear(2 * size, self._kv_heads * self._head_size, bias=False)
        self.v_proj = Linear(2 * size, self._kv_heads * self._head_size, bias=False)
        self.o_proj = Linear(self._heads * self._head_size, size, bias=False)

    def __call__(self, inputs: mx.array, attend: _UnrolledAttention, offset: int) -> mx.array:
        queries = self._rotated(self._split(self.q_proj(inputs), self._heads), offset)
        keys = self._rotated(self._split(self.k_proj(inputs), self._kv_heads), offset)
        values = self._split(self.v_proj(inputs), self._kv_heads)
        shared = self._heads // self._kv_heads
        output = attend(
            queries * self._head_size**-0.5,
            mx.repeat(keys, shared, axis=1),
            mx.repeat(values, shared, axis=1),
        )
        return self.o_proj(output.swapaxes(1, 2).reshape(*inputs.shape[:2], -1))

    def _split(self, states: mx.array, heads: int) -> mx.array:
        return states.reshape(*states.shape[:2], heads, self._head_size).swapaxes(1, 2)

    def _rotated(self, states: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(
            states, self._head_size, traditional=False, base=self._rope_base, scale=1.0, offset=offset
        )


class _FeedForward(Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def __call__(self, states: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))


class _Layer(Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def __call__(
        self, embeddings: mx.array, state: mx.array, attend: _UnrolledAttention, offset: int
    ) -> mx.array:
        inputs = mx.concatenate([self.input_layernorm(embeddings), self.hidden_norm(state)], axis=-1)
        state = state + self.self_attn(inputs, attend, offset)
        return state + self.mlp(self.post_attention_layernorm(state))
