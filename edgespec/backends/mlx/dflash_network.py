"""The network of a DFlash (arXiv 2602.06036) or DSpark head (arXiv 2607.05147)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.feed_forward import FeedForward
from edgespec.heads.dflash_config import DFlashConfig
from edgespec.heads.dflash_files import DFlashFiles

__all__ = ["DFlashNetwork"]


class DFlashNetwork(Module):
    """The network of a head. Its parameters have the names used by `edgespec.heads.dflash_files`."""

    def __init__(self, files: DFlashFiles) -> None:
        super().__init__()
        config = files.config
        self.fc = Linear(len(config.states) * config.size, config.size, bias=False)
        self.hidden_norm = RMSNorm(config.size, config.norm_eps)
        self.layers = [_Layer(config, window) for window in config.windows]
        self.norm = RMSNorm(config.size, config.norm_eps)
        if files.target_ids is not None:
            self.lm_head = Linear(config.size, len(files.target_ids), bias=False)
        if config.markov_rank:
            self.markov_head = _MarkovHead(config, files.draft_vocab_size)

    @property
    def dtype(self) -> mx.Dtype:
        """The data type in which the head computes."""
        return self.fc.weight.dtype

    @property
    def cache_count(self) -> int:
        """Number of KV caches."""
        return len(self.layers)

    def add_states(self, states: mx.array, caches: Sequence[AttentionCache]) -> None:
        """Compute keys and values from the target's hidden states [tokens, states * size], and cache them."""
        fused = self.hidden_norm(self.fc(states))[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.add(fused, cache)

    def __call__(self, embeddings: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        """Return the normalised hidden states [tokens, size] of a block, given its tokens' embeddings."""
        states = embeddings[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            states = layer(states, cache)
        return self.norm(states)[0]


class _MarkovHead(Module):
    """Computes logits from the previous token, which are added to the logits of the block."""

    def __init__(self, config: DFlashConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, draft_vocab_size, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the logits [tokens, draft vocabulary] to add after each of `tokens`."""
        return self.markov_w2(self.markov_w1(tokens))


class _Layer(Module):
    def __init__(self, config: DFlashConfig, window: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, window)
        self.mlp = FeedForward(config.size, config.feed_forward_size)
        self.input_layernorm = RMSNorm(config.size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.size, config.norm_eps)

    def __call__(self, states: mx.array, cache: AttentionCache) -> mx.array:
        states = states + self.self_attn(self.input_layernorm(states), cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class _Attention(Module):
    def __init__(self, config: DFlashConfig, window: int) -> None:
        super().__init__()
        self._config, self._window = config, window
        self.q_proj = Linear(config.size, config.heads * config.head_size, bias=False)
        self.k_proj = Linear(config.size, config.kv_heads * config.head_size, bias=False)
        self.v_proj = Linear(config.size, config.kv_heads * config.head_size, bias=False)
        self.o_proj = Linear(config.heads * config.head_size, config.size, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps)
        self.k_norm = RMSNorm(config.head_size, config.norm_eps)
        self.rope = initialize_rope(
            config.head_size,
            config.rope.theta,
            False,
            dict(config.rope.scaling) or None,
            config.context_tokens or None,
        )

    def add(self, states: mx.array, cache: AttentionCache) -> tuple[mx.array, mx.array]:
        """Append the keys and values of hidden states to the cache, and return all keys and values in it."""
        keys = self.rope(self.k_norm(self._split(self.k_proj(states))), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, self._split(self.v_proj(states)))
        return keys, values

    def __call__(self, states: mx.array, cache: AttentionCache) -> mx.array:
        count, before = states.shape[1], cache.offset
        queries = self.rope(self.q_norm(self._split(self.q_proj(states))), offset=before)
        keys, values = self.add(states, cache)
        attended = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self._config.head_size**-0.5,
            mask=self._mask(before, count),
        )
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(1, count, -1))

    def _mask(self, before: int, count: int) -> mx.array | None:
        """Return the attention mask of a block, bool [tokens, keys], or None if tokens attend to all keys."""
        queries, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)[None]
        seen = []
        if self._config.is_causal:
            seen.append(keys <= queries)
        if self._window:
            seen.append(queries - keys < self._window)
        if not seen:
            return None
        return seen[0] & seen[-1]

    def _split(self, rows: mx.array) -> mx.array:
        count = rows.shape[1]
        return rows.reshape(1, count, -1, self._config.head_size).transpose(0, 2, 1, 3)
