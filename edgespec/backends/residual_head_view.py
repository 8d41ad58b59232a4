"""Draft with Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edgespec.backends.base import Snapshot
from edgespec.backends.base_model import BaseModel
from edgespec.backends.head_view import AttentionHeadView, HeadView
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.model_facts import ModelFacts
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.heads.prefix_layer import PrefixLayer
from edgespec.heads.products import Array
from edgespec.heads.residual_network import ResidualNetwork

__all__ = ["PrefixHeadView", "ResidualHeadView"]


class _Node(NamedTuple):
    """A node of a draft tree.

    Attributes:
        head: Index of the head that predicts the token after the node.
        inputs: The head's input.
    """

    head: int
    inputs: Array


class ResidualHeadView(HeadView[BaseModel]):
    """Medusa or Hydra heads as a draft model, which predicts from the target's last known hidden state.

    The draft model has no KV cache. The first head predicts the token after the root of a draft tree, and
    each further head predicts the tokens one level deeper. Hydra heads also read the embeddings of the tokens
    on the path from the root to the node.

    Args:
        target: See `HeadView`, also for `log` and `release`.
        facts: Properties of the heads.
        network: The heads.
        embed: Returns the embeddings of token ids. None if the heads do not read tokens.
    """

    def __init__(
        self,
        target: BaseModel,
        log: HiddenStateLog,
        release: Callable[[], None],
        facts: ModelFacts,
        network: ResidualNetwork,
        embed: Callable[[Sequence[int]], Array] | None,
    ) -> None:
        super().__init__(target, log, release)
        self.facts = facts
        self._network, self._embed = network, embed
        self._nodes: list[_Node] = []

    @property
    def length(self) -> int:
        # A recurrent target may have been rewound, which makes it shorter than the text until its next pass.
        # The log still covers the whole text.
        return max(self._target.length, self.log.end)

    def _states_before(self, count: int) -> Array:
        """Return the head input for each of the next `count` tokens: the hidden state before the token."""
        return self._logged_states(self.length, count)

    def start_at(self, position: int) -> None:  # noqa: ARG002
        """Do nothing, because there is no KV cache."""
        self._check()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Return a snapshot without data, because there is no KV cache."""
        self._check()
        return Snapshot(self.length if end is None else end, b"", start)

    def restore(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        """Do nothing, because there is no KV cache."""
        self._check()

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        self._check_not_interrupted()
        check_tokens_fit(self, tree.width)
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
        """Append a `_Node` for each node of the tree from `first` on."""
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

        The root is always included, so that a warm-up pass works before the target has processed any tokens.
        """
        last = max(self.log.end - self.length, 0)
        return self._states_before(sum(depth <= last for depth in tree.depths))

    def _predict(self, head: int, nodes: Sequence[_Node], rows: Array) -> None:
        """Fill in the logits of all nodes that belong to this head."""
        at = [i for i, node in enumerate(nodes) if node.head == head]
        # Run each distinct input once, because all nodes of a Medusa tree at the same depth share one input.
        inputs = {id(nodes[i].inputs): nodes[i].inputs for i in at}
        logits = dict(zip(inputs, self._network.logits(head, np.array([*inputs.values()])), strict=True))
        for i in at:
            rows[i] = logits[id(nodes[i].inputs)]


class PrefixHeadView(AttentionHeadView, ResidualHeadView):
    """Hydra++ heads, which read the output of an attention layer instead of the target's hidden states.

    The attention layer has a KV cache. The entry for position p is computed from the target's hidden state at
    position p - 1, so there are no entries for drafted tokens, whose hidden states are not known yet.
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
        prefix: PrefixLayer,
    ) -> None:
        super().__init__(target, log, release, facts, network, embed)
        self._prefix, self._attention = prefix, prefix.attention
        self._length = 0

    def _append(self, tokens: Sequence[int]) -> None:
        self._prefix.append(super()._states_before(len(tokens)))

    def _states_before(self, count: int) -> Array:
        """Return the attention layer's output for each of the next `count` tokens."""
        self._keep(self.length)
        return self._prefix.run(super()._states_before(count))

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the KV cache entries of the last pass, all of which come from the target's hidden states."""
        self._known_nodes = self._attention.end - self._length
        super().commit(path)
