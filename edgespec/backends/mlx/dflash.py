"""Run DFlash heads (arXiv 2602.06036) and DSpark heads (arXiv 2607.05147) with MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from edgespec.backends.head_view import check_finite
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.eagle import FeedForward, HeadAttention
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.heads import (
    BATCH_TOKENS,
    MlxHead,
    MlxHeadCells,
    check_memory,
    check_sizes,
    checked_folder,
    evaluate_constants,
    head_facts,
    head_memory,
    loaded_bytes,
    target_embedding,
    target_lm_head,
    weight_array,
    wrong_layers_error,
)
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.tree import TokenTree
from edgespec.model.base import Head
from edgespec.model.heads.dflash_files import DFlashConfig, DFlashFiles, read_dflash
from edgespec.model.heads.layer_config import invalid_settings
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["DFlashHead", "estimate_head", "load_head"]


class DFlashNetwork(Module):
    """Network of a DFlash or DSpark head. Parameter names match `edgespec.model.heads.dflash_files`."""

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
        return self.fc.weight.dtype

    def add_states(self, states: mx.array, caches: Sequence[AttentionCache]) -> None:
        """Compute keys and values from the target's hidden states [tokens, states * size], and cache them."""
        fused = self.hidden_norm(self.fc(states))[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.add(fused, cache)

    def __call__(self, embeddings: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        """Return the normalised hidden states [tokens, size] for a block, given its token embeddings."""
        states = embeddings[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            states = layer(states, cache)
        return self.norm(states)[0]


class _MarkovHead(Module):
    """Computes logits from the previous token, to be added to the block's logits."""

    def __init__(self, config: DFlashConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, draft_vocab_size, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the logits [tokens, draft vocabulary] to add for the token that follows each of `tokens`."""
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


class _Attention(HeadAttention):
    def __init__(self, config: DFlashConfig, window: int) -> None:
        super().__init__(config, config.size, config.size)
        self._config, self._window = config, window
        self.q_norm = RMSNorm(config.head_size, config.norm_eps)
        self.k_norm = RMSNorm(config.head_size, config.norm_eps)

    def add(self, states: mx.array, cache: AttentionCache) -> tuple[mx.array, mx.array]:
        """Append the keys and values computed from `states` to the cache, and return its entire contents."""
        keys = self.rope(self.k_norm(self.split_heads(self.k_proj(states))), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, self.split_heads(self.v_proj(states)))
        return keys, values

    def __call__(self, states: mx.array, cache: AttentionCache) -> mx.array:
        count, before = states.shape[1], cache.offset
        queries = self.rope(self.q_norm(self.split_heads(self.q_proj(states))), offset=before)
        keys, values = self.add(states, cache)
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._head_size**-0.5, mask=self._mask(before, count)
        )
        return self.output(attended)

    def _mask(self, before: int, count: int) -> mx.array | None:
        """Return the block's attention mask, bool [tokens, keys], or None if tokens attend to all keys."""
        queries, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)[None]
        seen = []
        if self._config.is_causal:
            seen.append(keys <= queries)
        if self._window:
            seen.append(queries - keys < self._window)
        if not seen:
            return None
        return seen[0] & seen[-1]


class DFlashHead(MlxHead):
    """A head with its own KV cache that predicts a block of tokens from the target's hidden states.

    The cache row for position p is computed from the target's hidden states at p rather than from the token
    at p. A pass runs a block, which consists of the last emitted token and a mask token for each token to
    draft. The block itself leaves no rows in the cache.

    The logits after a draft token depend only on the token's position in the block, and on the token itself
    if there is a Markov head. One pass is therefore enough for a whole draft tree: `verify` runs the pass for
    the root, and looks up the logits of deeper nodes in its result. Nodes whose hidden states the target has
    already computed get the logits of the block's first token.

    Args:
        config: The head's configuration. See `MlxHead` for the other arguments.
    """

    def __init__(
        self,
        target: MlxModel,
        network: DFlashNetwork,
        config: DFlashConfig,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self._config, self._network = config, network
        self._first_row = 0 if config.predicts_next else 1
        capabilities = Capabilities(
            rollback=True,
            tree=True,
            max_draft_length=config.block_tokens - self._first_row,
            drafts_in_one_pass=True,
        )
        facts, cells = replace(facts, capabilities=capabilities), MlxHeadCells([len(network.layers)])
        super().__init__(target, config.states, cells, embed, lm_head, target_ids, facts)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        # The last block's logits, one row per draft token.
        self._rows = mx.zeros((0, 0))

    @property
    def first_position(self) -> int:
        """The first position whose hidden states are in the log."""
        return self.log.start

    def _append(self, tokens: Sequence[int]) -> None:
        self._add_states(self.length, self.length + len(tokens))
        evaluate(*self._cells.arrays)

    def _add_states(self, start: int, end: int) -> None:
        """Append the target's hidden states at positions [start, end) to the head's KV cache."""
        self._cells.layout.set_chain(start - self._cells.start)
        with translate_errors("the draft head could not be run"):
            self._network.add_states(
                mx.array(self.log.rows(start, end)).astype(self._network.dtype), self._cells.caches[0]
            )

    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        if first == 0:
            self._run_block(tree)
        depths = np.maximum(np.array(tree.depths[first:]) - self._known_nodes, 0)
        self._check_draft_length(int(depths.max()) + 1, len(self._rows))
        rows = self._rows_after(tree.tokens[first:], depths)
        start_evaluation(rows)
        return DeviceLogits(rows, tree.depths[first:])

    def _run_block(self, tree: TokenTree) -> None:
        """Cache the known hidden states of the tree's first nodes, then run a block from the next node."""
        self._keep(self.length)
        known = min(max(self.log.end - self.length, 0), tree.width - 1)
        begin = self.length + known
        if known:
            self._add_states(self.length, begin)
        masks = [self._config.mask_token] * (self._config.block_tokens - 1)
        self._cells.layout.set_chain(begin - self._cells.start)
        self._cells.layout.scratch = True
        try:
            with translate_errors("the draft head could not be run"):
                embeddings = self._embed(mx.array([tree.tokens[known], *masks]))
                states = self._network(embeddings.astype(self._network.dtype), self._cells.caches[0])
                self._rows = self._lm_head(states[self._first_row :]).astype(mx.float32)
        finally:
            self._cells.layout.scratch = False
            self._cells.rewind(begin)
        evaluate(self._rows, *self._cells.arrays)
        self._known_nodes = known

    def _rows_after(self, tokens: Sequence[int], depths: NDArray[np.int64]) -> mx.array:
        """Return one row of logits per token, given each token's depth below the first token of the block."""
        with translate_errors("the draft head could not be run"):
            rows = self._rows[mx.array(depths)]
            if self._config.markov_rank:
                rows = rows + self._network.markov_head(mx.array(list(tokens))).astype(mx.float32)
            return self._in_target_vocabulary(rows)

    def close(self) -> None:
        if not self._closed:
            super().close()
            del self._network


def estimate_head(head: Head, _target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory use of a head. See `registry.HeadNetwork`."""
    files = read_dflash(checked_folder(head.shown_path))
    config, fused = files.config, files.tensors["fc.weight"].shape[1]
    batch_elements = BATCH_TOKENS * (8 * config.size + 2 * config.feed_forward_size + fused)
    compute_elements = (
        batch_elements + 2 * config.block_tokens * config.vocab_size + MAX_LOGGED_TOKENS * fused
    )
    weight_bytes = loaded_bytes(files.tensors.values())
    return head_memory(context_tokens, weight_bytes, config.kv_bytes_per_token, compute_elements)


def load_head(target: MlxModel, head: Head) -> DFlashHead:
    """Load a DFlash or DSpark head for a target. See `registry.HeadNetwork`."""
    folder = checked_folder(head.shown_path)
    files = read_dflash(folder)
    config, name = files.config, f"the draft head of {target.facts.name}"
    check_sizes(target, folder, config.size, config.vocab_size)
    if not config.states or not all(0 <= state <= target.layer_count for state in config.states):
        raise wrong_layers_error(target, folder, config.states)
    check_memory(target, name, loaded_bytes(files.tensors.values()))
    weights = [(parameter, weight_array(tensor)) for parameter, tensor in files.tensors.items()]
    with invalid_settings(folder):
        network = DFlashNetwork(files)
        network.load_weights(weights, strict=True)
        evaluate_constants(layer.self_attn.rope for layer in network.layers)
    facts = head_facts(
        target,
        name,
        folder,
        "dspark" if config.markov_rank else "dflash",
        f"head that drafts blocks of {config.block_tokens} tokens",
        [array for _, array in weights],
        config.kv_bytes_per_token,
        config.context_tokens,
    )
    embed = target_embedding(target.net, config.vocab_size, config.size)
    lm_head = target_lm_head(target.net) if files.target_ids is None else network.lm_head
    view = DFlashHead(target, network, config, embed, lm_head, files.target_ids, facts)
    try:
        check_finite(view, folder)
    except BaseException:
        view.close()
        raise
    return view
