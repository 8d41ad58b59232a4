"""Run Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109) for all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from edgespec.backends.head_view import AttentionCells, HeadView, check_sizes
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.base_model import BaseModel
from edgespec.model.heads.numpy_layers import (
    Array,
    CachedAttention,
    MakeProduct,
    Product,
    Projections,
    RopeSettings,
    Rotation,
    WeightLoader,
    rms_norm,
    silu,
)
from edgespec.model.heads.residual_layout import (
    AttentionLayer,
    ResidualHead,
    ResidualHeads,
    read_residual_heads,
)
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, POST_NORM, HiddenStateLog
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart, check_weights_fit
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = [
    "AttentionShape",
    "PrefixLayer",
    "ResidualHeadTarget",
    "ResidualHeadView",
    "ResidualNetwork",
    "estimate_residual_heads",
    "load_residual_heads",
]

# Returns the memory needed for the heads' weights, in bytes.
WeightBytes: TypeAlias = Callable[[ResidualHeads], int]
_FLOAT32_BYTES = 4
# Number of logit rows to reserve memory for, which is enough for one level of a large draft tree.
_MAX_ROWS = 16


class AttentionShape(NamedTuple):
    """Attention settings that cannot be derived from the weights. Hydra++ heads use the target's.

    Attributes:
        heads: Number of query heads. Several query heads can share a key-value head.
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
        loader: Loads the weights.

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
        """Return a copy that shares the weights but has its own, empty KV cache."""
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


class ResidualNetwork:
    """Medusa or Hydra heads with loaded weights.

    Args:
        heads: The heads' layout.
        loader: Loads the heads' weights.
        shared_output: Multiplies by the target's LM head, for heads without output matrices.

    Raises:
        ModelFileError: The weights cannot be read, or contain infinite values or NaN.
    """

    def __init__(
        self, heads: ResidualHeads, loader: WeightLoader, shared_output: Product | None = None
    ) -> None:
        self._heads = [_Head(head, loader, shared_output) for head in heads.heads]

    def logits(self, head: int, inputs: Array) -> Array:
        """Return a head's logits [rows, vocabulary].

        Args:
            head: Index of the head.
            inputs: Hidden states [rows, size]. If the heads read tokens, each hidden state is followed by
                the embeddings of `head + 1` tokens.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self._heads[head](inputs)
        # Very large weights can make logits overflow. Replacing NaN makes the drafts useless but valid.
        return logits if np.isfinite(logits).all() else np.nan_to_num(logits)


class _Head:
    def __init__(self, head: ResidualHead, loader: WeightLoader, shared_output: Product | None) -> None:
        self._blocks = [
            (loader.linear(*linear), None if shortcut is None else loader.linear(*shortcut))
            for linear, shortcut in head.blocks
        ]
        output = loader.linear(*head.output) if head.output else shared_output
        assert output is not None
        self._output: Product = output

    def __call__(self, x: Array) -> Array:
        for linear, shortcut in self._blocks:
            x = (x if shortcut is None else shortcut(x)) + silu(linear(x))
        return self._output(x)


@dataclass(frozen=True, slots=True)
class ResidualHeadTarget:
    """The parts of a target that Medusa and Hydra heads use.

    Attributes:
        model: The model that the heads draft for.
        memory_bytes: Memory limit in bytes for the target, its KV cache and its heads. None if unlimited.
        layers: Number of layers in the target.
        attention: Settings of the target's attention layers, which Hydra++ heads also use.
        embed: Returns the token embeddings [tokens, size] for token ids.
        make_product: Returns a function that multiplies by one of the heads' matrices.
        output: Returns a function that multiplies by the target's LM head, for heads without output matrices.
        weight_bytes: Returns the memory needed for the heads' weights, in bytes.
    """

    model: BaseModel
    memory_bytes: int | None
    layers: int
    attention: AttentionShape
    embed: Callable[[Sequence[int]], Array]
    make_product: MakeProduct
    output: Callable[[], Product]
    weight_bytes: WeightBytes


def load_residual_heads(target: ResidualHeadTarget, path: Path) -> LoadedResidualHeads:
    """Load the Medusa or Hydra heads at `path` for a target.

    Raises:
        CapabilityError: The heads were made for a different target, or the target's hidden states cannot be
            read.
        ModelFileError: The files are damaged.
        MemoryBudgetError: The heads do not fit in memory.
    """
    heads, model = read_residual_heads(path), target.model.facts
    if heads.vocab_size:
        check_sizes(target.model, path, [("a vocabulary", model.vocab_size, heads.vocab_size)])
    if heads.layers_before_last >= target.layers:
        raise CapabilityError(
            f"the draft head {path} was made for another model: it reads the hidden states before the last"
            f" {heads.layers_before_last} layers, but {model.name} has only {target.layers} layers",
            "choose the head that was published for this model",
            code="head_mismatch",
        )
    facts = _facts(target, heads, path)
    if target.memory_bytes is not None:
        left = target.memory_bytes - model.weight_bytes - model.max_kv_bytes
        check_weights_fit(facts.name, facts.weight_bytes, LoadOptions(memory_bytes=max(0, left)))
    state = target.layers - heads.layers_before_last if heads.layers_before_last else POST_NORM
    log = target.model.log_hidden_states([state])
    try:
        check_sizes(target.model, path, [("hidden states", log.row_size, heads.state_size)])
        return LoadedResidualHeads(target, heads, path, state, facts)
    finally:
        target.model.stop_logging(log)


class LoadedResidualHeads:
    """The weights of Medusa or Hydra heads, shared by the views of all replies.

    Args:
        target: The model that the heads draft for.
        heads: The heads' layout.
        path: Path of the heads, for error messages.
        state: The hidden state that the heads read, numbered as in `HiddenStateSource`.
        facts: Properties of the heads.

    Raises:
        CapabilityError: The heads were made for a different target.
        ModelFileError: The files are damaged.
    """

    def __init__(
        self, target: ResidualHeadTarget, heads: ResidualHeads, path: Path, state: int, facts: ModelFacts
    ) -> None:
        self._state, self._facts = state, facts
        loader = WeightLoader(heads.file, target.make_product)
        self._embed = target.embed if heads.reads_tokens else None
        if self._embed:
            self._embed([0])  # Report unreadable embeddings now, rather than during a reply.
        self._network = ResidualNetwork(heads, loader, None if heads.vocab_size else target.output())
        self._prefix: PrefixLayer | None = None
        if heads.prefix:
            _check_attention(target, heads, heads.prefix, path)
            self._prefix = PrefixLayer(heads.prefix, target.attention, loader)

    def view(self, target: BaseModel, release: Callable[[], None] = lambda: None) -> ResidualHeadView:
        """Return a view of the heads. If the heads use a KV cache, each view has its own.

        Args:
            target: The target, or a concurrent reply's view of it.
            release: Called when the view is closed.
        """
        log = target.log_hidden_states([self._state])
        prefix = self._prefix.with_own_cache() if self._prefix else None
        return ResidualHeadView(target, log, release, self._facts, self._network, self._embed, prefix)

    def close(self) -> None:
        """Do nothing. The weights are garbage-collected together with the last view."""


def _check_attention(
    target: ResidualHeadTarget, heads: ResidualHeads, prefix: AttentionLayer, path: Path
) -> None:
    """Raise CapabilityError if a Hydra++ attention layer does not match the target's head size."""
    size, heads_of_target, keys = heads.state_size, target.attention.heads, prefix.k_proj.shape[0]
    head_size = size // heads_of_target if heads_of_target else 0
    if not head_size or head_size % 2 or size % head_size or keys % head_size or size % keys:
        raise CapabilityError(
            f"the draft head {path} was made for another model: its keys of size {keys:,} cannot be divided"
            f" among the {heads_of_target} attention heads of {target.model.facts.name}",
            "choose the head that was published for this model",
            code="head_mismatch",
        )


def _facts(target: ResidualHeadTarget, heads: ResidualHeads, path: Path) -> ModelFacts:
    model = target.model.facts
    return replace(
        model,
        name=f"the draft head of {model.name}",
        path=str(path),
        description=f"{len(heads.heads)} heads, {heads.parameters / 1e6:,.1f} M weights",
        parameters=heads.parameters,
        file_bytes=heads.file.stat().st_size,
        weight_bytes=target.weight_bytes(heads),
        kv_bytes=_token_bytes(heads) * model.context_tokens,
        capabilities=Capabilities(
            rollback=True,
            tree=model.capabilities.tree,
            max_branches=model.capabilities.max_branches,
            max_draft_length=len(heads.heads),
        ),
        notice="",
        requested_context_tokens=0,
        requested_kv_bytes=0,
    )


def _token_bytes(heads: ResidualHeads) -> int:
    """Return the size of the heads' KV cache per token, in bytes."""
    return 2 * heads.prefix.k_proj.shape[0] * _FLOAT32_BYTES if heads.prefix else 0


def estimate_residual_heads(
    path: Path, context_tokens: int, vocab_size: int, weight_bytes: WeightBytes
) -> MemoryEstimate:
    """Estimate the memory that Medusa or Hydra heads need, including the hidden-state log that they read.

    Args:
        path: The heads' folder or file.
        context_tokens: The target's context size.
        vocab_size: The target's vocabulary size.
        weight_bytes: Returns the memory needed for the heads' weights, in bytes.

    Raises:
        CapabilityError: edgespec does not support this kind of head.
        ModelFileError: The files are missing or damaged.
    """
    heads = read_residual_heads(path)
    state_bytes = MAX_LOGGED_TOKENS * heads.state_size * _FLOAT32_BYTES
    return MemoryEstimate(
        context_tokens,
        "f32",
        (
            MemoryPart("weights", weight_bytes(heads)),
            MemoryPart("cache", _token_bytes(heads) * context_tokens, per_reply=True),
            MemoryPart("compute", state_bytes, per_reply=True),
            MemoryPart("output", _MAX_ROWS * vocab_size * _FLOAT32_BYTES, per_reply=True),
        ),
    )


class _Node(NamedTuple):
    """A node of a draft tree.

    Attributes:
        head: Index of the head that predicts the token after the node.
        inputs: The head's input.
    """

    head: int
    inputs: Array


class ResidualHeadView(HeadView[BaseModel]):
    """Medusa or Hydra heads as a draft model that predicts from the target's last known hidden state.

    The first head predicts the children of a draft tree's root, and each further head predicts one level
    deeper. Hydra heads also read the embeddings of the tokens on the path from the root to the node. Hydra++
    heads read an attention layer's output instead of the target's hidden states. Only this layer has a KV
    cache, which has no entries for drafted tokens because their hidden states are not known yet.

    Args:
        target: The model that the heads draft for.
        log: The log of the target's hidden states. See `HeadView`.
        release: Called when the view is closed.
        facts: Properties of the heads.
        network: The heads.
        embed: Returns the embeddings of token ids. None if the heads do not read tokens.
        prefix: The attention layer of Hydra++ heads. None for other heads.
    """

    _batch_tokens = 256

    def __init__(
        self,
        target: BaseModel,
        log: HiddenStateLog,
        release: Callable[[], None],
        facts: ModelFacts,
        network: ResidualNetwork,
        embed: Callable[[Sequence[int]], Array] | None,
        prefix: PrefixLayer | None,
    ) -> None:
        super().__init__(target, log, release, AttentionCells(prefix.attention) if prefix else None)
        self.facts = facts
        self._network, self._embed, self._prefix = network, embed, prefix
        self._nodes: list[_Node] = []

    def _append(self, tokens: Sequence[int]) -> None:
        if self._prefix:
            self._prefix.append(self._logged_states(self.length, len(tokens)))

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        if first == 0:
            self._nodes = []
        self._add_nodes(tree, first)
        rows = np.empty((tree.width - first, self.facts.vocab_size), np.float32)
        nodes = self._nodes[first:]
        for head in sorted({node.head for node in nodes}):
            self._check_not_interrupted()
            self._predict(head, nodes, rows)
        return HostLogits(rows)

    def _add_nodes(self, tree: TokenTree, first: int) -> None:
        """Append a `_Node` for each node of the tree, starting at `first`."""
        states = self._known_states(tree) if first == 0 else ()
        embeddings = self._embed(tree.tokens[first:]) if self._embed else None
        for i, parent in enumerate(tree.parents[first:]):
            if i < len(states):
                head, inputs = 0, states[i]
            else:
                head, inputs = self._nodes[parent].head + 1, self._nodes[parent].inputs
            self._check_draft_length(head + 1, self.facts.capabilities.max_draft_length)
            if embeddings is not None:
                inputs = np.concatenate([inputs, embeddings[i]])
            self._nodes.append(_Node(head, inputs))

    def _known_states(self, tree: TokenTree) -> Array:
        """Return the head inputs for the tree's nodes whose preceding hidden state is known.

        The root is always included, so that warm-up works before the target has processed any tokens.
        """
        self._keep(self.length)
        last = max(self.log.end - self.length, 0)
        self._known_nodes = sum(depth <= last for depth in tree.depths)
        states = self._logged_states(self.length, self._known_nodes)
        return self._prefix.run(states) if self._prefix else states

    def _predict(self, head: int, nodes: Sequence[_Node], rows: Array) -> None:
        """Fill in the logits of all nodes that belong to a head."""
        at = [i for i, node in enumerate(nodes) if node.head == head]
        # Run each distinct input only once: all nodes of a Medusa tree at the same depth share one input.
        inputs = {id(nodes[i].inputs): nodes[i].inputs for i in at}
        logits = dict(zip(inputs, self._network.logits(head, np.array([*inputs.values()])), strict=True))
        for i in at:
            rows[i] = logits[id(nodes[i].inputs)]
