"""Run EAGLE heads and MTP layers, small networks that read the target's hidden states, with MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import HeadView, load_most_accurate
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.eagle_network import EagleNetwork
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.heads import (
    BATCH_TOKENS,
    MlxHeadCells,
    check_memory,
    check_sizes,
    checked_folder,
    evaluate_constants,
    head_facts,
    head_memory,
    loaded_bytes,
    weight_array,
)
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.pass_layout import install_tree_ropes
from edgespec.backends.mlx.target_ends import DraftVocabulary, HeadTarget, TargetEmbedding, TargetLmHead
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import CapabilityError
from edgespec.model.base import Head
from edgespec.model.heads.eagle_files import EagleFiles, read_eagle
from edgespec.model.heads.layer_config import invalid_settings
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["EagleHead", "HiddenStateNetwork", "estimate_head", "load_head"]


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


class EagleHead(HeadView[HeadTarget]):
    """A head that reads each token together with the preceding hidden state.

    The token at position p is processed with the target's hidden state at position p - 1. Draft tokens have
    no such state yet, so the head uses its own hidden state instead. After verification, `commit` removes the
    cache rows of draft tokens, and the next prefill reruns accepted tokens with the target's hidden states.

    A head can have a chain of networks, each trained to predict one token further ahead than the previous
    one. The first network predicts the children of the draft tree's root, the second predicts their children,
    and so on. The last network also predicts all deeper nodes. Networks cannot share keys and values, so each
    one processes every token.

    Args:
        target: The target that the head drafts for.
        states: The target's hidden states that the head reads. Passed to `log_hidden_states`.
        networks: The networks, with evaluated weights.
        embed: Returns the embeddings of token ids.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: The target's token id for each token of the draft vocabulary, or None if the vocabularies
            are the same.
        facts: The head's name and sizes.
    """

    _cells: MlxHeadCells

    def __init__(
        self,
        target: HeadTarget,
        states: Sequence[int],
        networks: Sequence[HiddenStateNetwork],
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self.networks, self._embed, self._lm_head = networks, embed, lm_head
        # Index of the network that runs the draft tree's current level.
        self._step = 0
        self._draft_vocabulary = DraftVocabulary(target_ids, target.facts.vocab_size)
        cells = MlxHeadCells([network.cache_count for network in networks])
        for network in networks:
            install_tree_ropes(network, cells.layout)
        capabilities = Capabilities(
            rollback=True,
            tree=target.facts.capabilities.tree,
            max_width=min(BATCH_TOKENS, target.facts.capabilities.max_width),
        )
        self.facts = replace(facts, capabilities=capabilities)
        # Open the log last, because nothing would close it if a later line failed.
        super().__init__(target, target.log_hidden_states(states), cells=cells)
        self._keep(0)

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
        """Return logits for the target's vocabulary. Tokens outside the draft vocabulary get -inf."""
        with translate_errors("the draft head could not be run"):
            rows = self._lm_head(self.networks[self._step].normalised(states)).astype(mx.float32)
            return self._draft_vocabulary.spread(rows)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._keep(self.length)
            del self.networks, self._cells.caches, self._embed, self._lm_head, self._draft_vocabulary


def estimate_head(head: Head, _target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory use of a head. See `registry.HeadNetwork`."""
    files = read_eagle(checked_folder(head.shown_path))
    config, fused = files.config, files.tensors["fc.weight"].shape[1]
    weight_bytes = sum(loaded_bytes(tensor) for tensor in files.tensors.values())
    row = 2 * config.vocab_size + 8 * config.hidden_size + 2 * config.feed_forward_size + fused
    compute_elements = BATCH_TOKENS * row + MAX_LOGGED_TOKENS * fused
    return head_memory(context_tokens, weight_bytes, config.kv_bytes_per_token, compute_elements)


def load_head(target: HeadTarget, head: Head) -> EagleHead:
    """Load an EAGLE head for a target. See `registry.HeadNetwork`.

    An EAGLE head's configuration does not say which hidden states the head reads, or whether its input
    starts with the embedding or the hidden state. We therefore try all combinations (see
    `load_most_accurate`).
    """
    folder = checked_folder(head.shown_path)
    files = read_eagle(folder)
    name = f"the draft head of {target.facts.name}"
    check_sizes(target, folder, files.config.target_size, files.config.vocab_size)
    check_memory(target, name, files.weight_bytes)
    weights = [(parameter, weight_array(tensor)) for parameter, tensor in files.tensors.items()]
    choices = (
        _head(target, files, weights, states, hidden_first, name, folder)
        for hidden_first in (False, True)
        for states in _state_choices(target, files, folder)
    )
    return load_most_accurate(target, choices, folder)


def _state_choices(target: HeadTarget, files: EagleFiles, folder: Path) -> list[tuple[int, ...]]:
    """Return the combinations of hidden states that the head may read, most likely first."""
    layers = target.layer_count
    if files.config.version == 1:
        # Most heads read the hidden state after the final norm, as in EAGLE's own code. Others read the state
        # before it.
        return [(POST_NORM,), (layers,)]
    choices = files.config.layer_choices(layers)
    if not choices:
        raise CapabilityError(
            f"the draft head {folder} was made for another model: it reads the layers"
            f" {list(files.config.layers or ())}, but {target.facts.name} has {layers} layers",
            "choose the head that was published for this model",
            code="head_mismatch",
        )
    return choices


def _head(
    target: HeadTarget,
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
        else TargetEmbedding(target.net, config.vocab_size, config.hidden_size)
    )
    lm_head = network.lm_head if "lm_head.weight" in parameters else TargetLmHead(target.net)
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
