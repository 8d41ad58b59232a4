"""The decoder layer of an EAGLE head (arXiv 2401.15077 and 2503.01840)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.model.heads.eagle_files import EagleConfig, EagleFiles

__all__ = ["EagleLayer", "EagleNetwork", "FeedForward"]


class FeedForward(Module):
    """A gated feed-forward block (SwiGLU, arXiv 2002.05202).

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


class EagleNetwork(Module):
    """The network of an EAGLE head, with the canonical parameter names of `model.heads.eagle_files`.

    EAGLE-3 first reduces several of the target's hidden states to one (`reduced`), and normalises the inputs.
    EAGLE-1 reads a single hidden state and combines it with the token's embedding in `fc`.

    Args:
        files: The head's configuration and weights.
        hidden_first: Whether the head was trained with the hidden state before the embedding in its input.
            Usually, the embedding comes first.
    """

    def __init__(self, files: EagleFiles, hidden_first: bool = False) -> None:
        super().__init__()
        self._hidden_first = hidden_first
        config, names = files.config, files.tensors.keys()
        self._config = config
        size, eps = config.hidden_size, config.norm_eps
        fused = files.tensors["fc.weight"].shape[1]
        self.fc = Linear(fused, size, bias="fc.bias" in names)
        self.layer = EagleLayer(config, {name for name in names if name.endswith(".bias")}, hidden_first)
        if config.version == 3:
            self.norm = RMSNorm(size, eps)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, eps)
        if "fc_norm.0.weight" in names:
            self.fc_norm = [RMSNorm(config.target_size, eps) for _ in range(fused // config.target_size)]
        if "lm_head.weight" in names:
            self.lm_head = Linear(size, files.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in names:
            self.embed_tokens = Embedding(config.vocab_size, size)

    @property
    def dtype(self) -> mx.Dtype:
        return self.fc.weight.dtype

    @property
    def cache_count(self) -> int:
        return 1

    def reduced(self, states: mx.array) -> mx.array:
        if self._config.version == 1:
            return states
        if "input_norm" in self:
            states = self.input_norm(states)
        if "fc_norm" in self:
            parts = mx.split(states, len(self.fc_norm), axis=-1)
            states = mx.concatenate(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1
            )
        return self.fc(states)

    def __call__(self, embeddings: mx.array, states: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        """Return the layer's hidden states [tokens, size].

        Takes each token's embedding and the preceding hidden state. See `HiddenStateNetwork.__call__`.
        """
        attend = _CachedAttention(caches[0])
        if self._config.version == 1:
            states = self.fc(_joined(embeddings, states, self._hidden_first))
            return self.layer(states[None], None, attend)[0]
        return self.layer(states[None], embeddings[None], attend)[0]

    def normalised(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._config.version == 3 else states

    def fed_back(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._config.norm_output else states


def _joined(embeddings: mx.array, states: mx.array, hidden_first: bool) -> mx.array:
    return mx.concatenate([states, embeddings] if hidden_first else [embeddings, states], axis=-1)


class Attend(Protocol):
    """Computes attention for new tokens over their own keys and values and all earlier ones.

    Attributes:
        offset: Position of the first new token.
    """

    @property
    def offset(self) -> int: ...

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Return the attention output [batch, heads, tokens, head size]."""


class _CachedAttention:
    """Appends new tokens to a KV cache, and attends to all tokens in it."""

    def __init__(self, cache: AttentionCache) -> None:
        self._cache = cache
        self.offset = cache.offset

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        mask = self._cache.make_mask(queries.shape[2])
        keys, values = self._cache.update_and_fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class EagleLayer(Module):
    """The transformer layer of an EAGLE head.

    Args:
        config: The head's configuration.
        biases: Names of the head's bias tensors, including the prefix `layer.`.
        hidden_first: See `EagleNetwork`.
    """

    def __init__(self, config: EagleConfig, biases: Collection[str] = (), hidden_first: bool = False) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self._norm_before_residual, self._hidden_first = config.norm_before_residual, hidden_first
        self.self_attn = _Attention(config, biases)
        self.mlp = FeedForward(size, config.feed_forward_size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        if config.version == 3:
            self.input_layernorm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)

    def __call__(self, states: mx.array, embeddings: mx.array | None, attend: Attend) -> mx.array:
        """Return the hidden states [batch, tokens, size]. EAGLE-1 layers do not use `embeddings`."""
        residual = inputs = states
        if embeddings is not None:
            normalised = self.hidden_norm(states)
            inputs = _joined(self.input_layernorm(embeddings), normalised, self._hidden_first)
            residual = normalised if self._norm_before_residual else states
        states = residual + self.self_attn(inputs, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class _Attention(Module):
    def __init__(self, config: EagleConfig, biases: Collection[str]) -> None:
        super().__init__()
        inputs = config.hidden_size * (2 if config.version == 3 else 1)
        self._heads, self._kv_heads, self._head_size = config.heads, config.kv_heads, config.head_size
        rows = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
        for name, heads in rows.items():
            bias = f"layer.self_attn.{name}_proj.bias" in biases
            self[f"{name}_proj"] = Linear(inputs, heads * config.head_size, bias=bias)
        self.o_proj = Linear(config.heads * config.head_size, config.hidden_size, bias=False)
        self.rope = initialize_rope(
            config.head_size,
            config.rope.theta,
            False,
            dict(config.rope.scaling) or None,
            config.context_tokens or None,
        )

    def __call__(self, inputs: mx.array, attend: Attend) -> mx.array:
        def split(rows: mx.array, heads: int) -> mx.array:
            return rows.reshape(*rows.shape[:2], heads, self._head_size).transpose(0, 2, 1, 3)

        offset = attend.offset
        queries = self.rope(split(self.q_proj(inputs), self._heads), offset=offset)
        keys = self.rope(split(self.k_proj(inputs), self._kv_heads), offset=offset)
        values = split(self.v_proj(inputs), self._kv_heads)
        attended = attend(queries, keys, values, self._head_size**-0.5)
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(*inputs.shape[:2], -1))
