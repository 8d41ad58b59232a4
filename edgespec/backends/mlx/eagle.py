"""Run EAGLE heads (arXiv 2401.15077 and 2503.01840), and heads like them, with MLX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope
from numpy.typing import NDArray

from edgespec.backends.head_view import load_most_accurate
from edgespec.backends.mlx.attention_cache import AttentionCache, install_tree_ropes
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
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.model.base import Head
from edgespec.model.heads.eagle_files import EagleConfig, EagleFiles, read_eagle
from edgespec.model.heads.layer_config import LayerConfig, invalid_settings
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["EagleHead", "EagleLayer", "FeedForward", "HeadAttention", "estimate_head", "load_head"]


class HiddenStateNetwork(Protocol):
    """The network of a head that reads each token together with the preceding hidden state."""

    @property
    def dtype(self) -> mx.Dtype:
        """The head's compute data type."""

    @property
    def cache_count(self) -> int:
        """Number of KV caches."""

    def reduced(self, states: mx.array) -> mx.array:
        """Convert the target's hidden states to the head's inputs [tokens, size]."""

    def __call__(self, embeddings: mx.array, states: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        """Run the head and return its hidden states [tokens, size].

        Args:
            embeddings: The embedding of each token [tokens, size].
            states: For each token, the hidden state of the preceding token, from `reduced` or `fed_back`.
            caches: The head's KV caches. The pass appends a row for each token.
        """

    def normalised(self, states: mx.array) -> mx.array:
        """Convert the head's hidden states to inputs of the LM head."""

    def fed_back(self, states: mx.array) -> mx.array:
        """Convert the head's hidden states to its own inputs for the next draft step."""


class EagleHead(MlxHead):
    """A head that reads each token together with the preceding hidden state.

    The token at position p is processed with the target's hidden state at position p - 1. Draft tokens have
    no such state yet, so the head uses its own hidden state instead. After verification, `commit` removes the
    cache rows of draft tokens, and the next prefill reruns accepted tokens with the target's hidden states.

    A head can have a chain of networks, each trained to predict one token further ahead than the previous
    one. The first network predicts the children of the draft tree's root, the second predicts their children,
    and so on. The last network also predicts all deeper nodes. Networks cannot share keys and values, so each
    one processes every token.

    Args:
        networks: The networks, with evaluated weights. See `MlxHead` for the other arguments.
    """

    def __init__(
        self,
        target: MlxModel,
        states: Sequence[int],
        networks: Sequence[HiddenStateNetwork],
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self.networks = networks
        # Index of the network that runs the draft tree's current level.
        self._step = 0
        cells = MlxHeadCells([network.cache_count for network in networks])
        for network in networks:
            install_tree_ropes(network, cells.layout)
        capabilities = Capabilities(
            rollback=True,
            tree=target.facts.capabilities.tree,
            max_width=min(BATCH_TOKENS, target.facts.capabilities.max_width),
        )
        facts = replace(facts, capabilities=capabilities)
        super().__init__(target, states, cells, embed, lm_head, target_ids, facts)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        self._round = TreeBuilder()
        # The head's hidden states [nodes, size] from each pass over the current draft tree, after `fed_back`
        # converted them to inputs for the next draft step.
        self._own_states: list[mx.array] = []

    def _append(self, tokens: Sequence[int]) -> None:
        for step in range(len(self.networks)):
            self._step = step
            self._cells.layout.set_chain(self.length - self._cells.start)
            self._run(tokens, self._target_states(self.length, len(tokens)))
        evaluate(*self._cells.arrays)

    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        if first == 0:
            self._keep(self.length)
        before, self._step = self._step, min(self._step + 1, len(self.networks) - 1) if first else 0
        if first and self._step != before:
            self._run_again(tree, first)
        self._round.extend(tree, first)
        own, network = [], self.networks[self._step]
        for begin, end in self._passes(tree, first):
            self._set_layout(begin, end)
            own.append(self._run(tree.tokens[begin:end], self._states_before(tree, begin, end)))
            self._own_states.append(network.fed_back(own[-1]))
        rows = self._logits(mx.concatenate(own))
        start_evaluation(rows, *self._own_states, *self._cells.arrays)
        return DeviceLogits(rows, self._round.depths[first:])

    def _run_again(self, tree: TokenTree, count: int) -> None:
        """Run the current network on the tree's first `count` nodes again, to fill that network's cache."""
        known = self._known_nodes
        self._set_layout(0, count)
        states = [self._target_states(self.length, known)]
        if known < count:
            states.append(self._states_before(tree, known, count))
        self._run(tree.tokens[:count], mx.concatenate(states))

    def commit(self, path: tuple[int, ...]) -> None:
        if len(self.networks) > 1:
            # Some networks have not run these nodes, so the next prefill reruns them.
            self._known_nodes = 0
        super().commit(path)

    def _passes(self, tree: TokenTree, first: int) -> list[tuple[int, int]]:
        """Split the nodes, starting at `first`, into ranges that can each run in one pass.

        The first range contains the tokens that directly follow the target's hidden states. Each later node
        needs the head's own hidden state after its parent, so the parent must be in an earlier range.
        """
        begin, ranges = first, []
        if first == 0:
            # During warm-up, the root runs even before the target has processed any tokens.
            last = max(self.log.end, self.length)
            begin = self._known_nodes = sum(self.length + depth <= last for depth in self._round.depths)
            ranges.append((0, begin))
        return [*ranges, *tree.independent_ranges(begin)]

    def _set_layout(self, begin: int, end: int) -> None:
        start, nodes, layout = self.length - self._cells.start, self._round, self._cells.layout
        if nodes.is_chain:
            layout.set_chain(start)
        else:
            layout.set_tree(start, nodes.parents[:end], nodes.depths[:end], begin)

    def _states_before(self, tree: TokenTree, begin: int, end: int) -> mx.array:
        """Return the hidden state before each node: the target's if known, else the head's own."""
        if end <= self._known_nodes:
            return self._target_states(self.length + begin, end - begin)
        return mx.concatenate(self._own_states)[mx.array(tree.parents[begin:end])]

    def _target_states(self, start: int, count: int) -> mx.array:
        """Return the target's reduced hidden states before each of `count` tokens."""
        network = self.networks[self._step]
        return network.reduced(mx.array(self._logged_states(start, count)).astype(network.dtype))

    def _run(self, tokens: Sequence[int], states: mx.array) -> mx.array:
        """Return the head's hidden states for `tokens`, given the hidden state preceding each."""
        with translate_errors("the draft head could not be run"):
            network = self.networks[self._step]
            embeddings = self._embed(mx.array(list(tokens))).astype(network.dtype)
            return network(embeddings, states, self._cells.caches[self._step])

    def _logits(self, states: mx.array) -> mx.array:
        with translate_errors("the draft head could not be run"):
            rows = self._lm_head(self.networks[self._step].normalised(states)).astype(mx.float32)
            return self._in_target_vocabulary(rows)

    def close(self) -> None:
        if not self._closed:
            super().close()
            del self.networks


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


class HeadAttention(Module):
    """The projections (those in `biases` with a bias) and rotary embedding of a head's attention layer."""

    def __init__(self, config: LayerConfig, inputs: int, outputs: int, biases: Collection[str] = ()) -> None:
        super().__init__()
        self._head_size = config.head_size
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            self[f"{name}_proj"] = Linear(inputs, heads * config.head_size, bias=name in biases)
        self.o_proj = Linear(config.heads * config.head_size, outputs, bias=False)
        scaling, context_tokens = dict(config.rope.scaling), config.context_tokens
        self.rope = initialize_rope(
            config.head_size, config.rope.theta, False, scaling or None, context_tokens or None
        )

    def split_heads(self, rows: mx.array) -> mx.array:
        """Split projected tokens [batch, tokens, ...] into heads [batch, heads, tokens, head size]."""
        return rows.reshape(*rows.shape[:2], -1, self._head_size).transpose(0, 2, 1, 3)

    def output(self, attended: mx.array) -> mx.array:
        """Return the layer's output [batch, tokens, outputs] for the result of its heads."""
        batch, _, tokens, _ = attended.shape
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(batch, tokens, -1))


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


class _Attention(HeadAttention):
    def __init__(self, config: EagleConfig, biases: Collection[str]) -> None:
        inputs = config.hidden_size * (2 if config.version == 3 else 1)
        own = {name for name in "qkv" if f"layer.self_attn.{name}_proj.bias" in biases}
        super().__init__(config, inputs, config.hidden_size, own)

    def __call__(self, inputs: mx.array, attend: Attend) -> mx.array:
        offset = attend.offset
        queries = self.rope(self.split_heads(self.q_proj(inputs)), offset=offset)
        keys = self.rope(self.split_heads(self.k_proj(inputs)), offset=offset)
        values = self.split_heads(self.v_proj(inputs))
        return self.output(attend(queries, keys, values, self._head_size**-0.5))


def estimate_head(head: Head, _target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory use of a head. See `registry.HeadNetwork`."""
    files = read_eagle(checked_folder(head.shown_path))
    config, fused = files.config, files.tensors["fc.weight"].shape[1]
    weight_bytes = loaded_bytes(files.tensors.values())
    row = 2 * config.vocab_size + 8 * config.hidden_size + 2 * config.feed_forward_size + fused
    compute_elements = BATCH_TOKENS * row + MAX_LOGGED_TOKENS * fused
    return head_memory(context_tokens, weight_bytes, config.kv_bytes_per_token, compute_elements)


def load_head(target: MlxModel, head: Head) -> EagleHead:
    """Load an EAGLE head for a target. See `registry.HeadNetwork`.

    An EAGLE head's configuration does not say which hidden states the head reads, or whether its input
    starts with the embedding or the hidden state. We therefore try all combinations (see
    `load_most_accurate`).
    """
    folder = checked_folder(head.shown_path)
    files = read_eagle(folder)
    name = f"the draft head of {target.facts.name}"
    check_sizes(target, folder, files.config.target_size, files.config.vocab_size)
    check_memory(target, name, loaded_bytes(files.tensors.values()))
    weights = [(parameter, weight_array(tensor)) for parameter, tensor in files.tensors.items()]
    choices = (
        _head(target, files, weights, states, hidden_first, name, folder)
        for hidden_first in (False, True)
        for states in _state_choices(target, files, folder)
    )
    return load_most_accurate(target, choices, folder)


def _state_choices(target: MlxModel, files: EagleFiles, folder: Path) -> list[tuple[int, ...]]:
    """Return the combinations of hidden states that the head may read, most likely first."""
    if files.config.version == 1:
        # Most heads read the hidden state after the final norm, as in EAGLE's own code. Others read the state
        # before it.
        return [(POST_NORM,), (target.layer_count,)]
    choices = files.config.layer_choices(target.layer_count)
    if not choices:
        raise wrong_layers_error(target, folder, files.config.layers or ())
    return choices


def _head(
    target: MlxModel,
    files: EagleFiles,
    weights: Sequence[tuple[str, mx.array]],
    states: Sequence[int],
    hidden_first: bool,
    name: str,
    folder: Path,
) -> EagleHead:
    """Create a head whose input has `states` either before (`hidden_first`) or after the embedding."""
    config = files.config
    with invalid_settings(folder):
        network = EagleNetwork(files, hidden_first)
        network.load_weights(list(weights), strict=True)
        evaluate_constants([network.layer.self_attn.rope])
    parameters = dict(weights)
    embed = (
        network.embed_tokens
        if "embed_tokens.weight" in parameters
        else target_embedding(target.net, config.vocab_size, config.hidden_size)
    )
    lm_head = network.lm_head if "lm_head.weight" in parameters else target_lm_head(target.net)
    facts = head_facts(
        target,
        name,
        folder,
        f"eagle{config.version}",
        f"EAGLE-{config.version} head that reads the hidden states {list(states)}",
        list(parameters.values()),
        config.kv_bytes_per_token,
        config.context_tokens,
    )
    return EagleHead(target, states, [network], embed, lm_head, files.target_ids, facts)
