"""Draft with Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edgespec.backends.base import ModelFacts, Progress, Vocabulary
from edgespec.backends.base_model import BaseModel, in_batches
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError
from edgespec.heads.prefix_layer import PrefixLayer
from edgespec.heads.products import Array
from edgespec.heads.residual_network import ResidualNetwork

__all__ = ["PrefixHeadView", "ResidualHeadView"]

# Maximum number of tokens whose hidden states the layer of Hydra++ heads reads at once.
_BATCH_TOKENS = 256


class _Node(NamedTuple):
    """A node of a draft tree: the head that predicts the token after it, and the input of the head."""

    head: int
    inputs: Array


class ResidualHeadView(SelfDraftView[BaseModel]):
    """A draft model without a KV cache, which predicts from the target's last known hidden state.

    The first head predicts the token after the root of a tree, and each further head the token after nodes
    that are one level deeper. Heads that read tokens also see those on the path from the root to the node.
    """

    def __init__(
        self,
        target: BaseModel,
        log: HiddenStateLog,
        stop_logging: Callable[[], None],
        facts: ModelFacts,
        network: ResidualNetwork,
        embed: Callable[[Sequence[int]], Array] | None,
    ) -> None:
        """Create a view of a target.

        Args:
            target: The target.
            log: Its hidden states.
            stop_logging: Called when the view is closed.
            facts: Properties of the heads.
            network: The heads.
            embed: Returns the embeddings of tokens. None if the heads do not read tokens.
        """
        super().__init__(target)
        self.facts = facts
        self.vocabulary: Vocabulary = target.vocabulary
        self._log, self._stop_logging = log, stop_logging
        self._network, self._embed = network, embed
        self._nodes: list[_Node] = []
        self._interrupted = False

    @property
    def length(self) -> int:
        # A recurrent target can be rewound, and runs some of the logged tokens again in its next pass.
        return max(self._target.length, self._log.end)

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self.length)

    @property
    def first_position(self) -> int:
        """The first position at which a token can be run with a hidden state of the target."""
        return self._log.start + 1

    @property
    def last_position(self) -> int:
        """The last position at which a token can be run with a hidden state of the target."""
        return self._log.end

    def start_at(self, position: int) -> None:  # noqa: ARG002
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
        """Find the head and the input of each node from `first` on."""
        states = self._known_states(tree) if first == 0 else ()
        embeddings = self._embed(tree.tokens[first:]) if self._embed else None
        for i, parent in enumerate(tree.parents[first:]):
            if i < len(states):
                head, inputs = 0, states[i]
            else:
                head, inputs = self._nodes[parent].head + 1, self._nodes[parent].inputs
            self._check_draft_length(head + 1)
            if embeddings is not None:
                inputs = np.concatenate([inputs, embeddings[i]])
            self._nodes.append(_Node(head, inputs))

    def _check_draft_length(self, length: int) -> None:
        limit = self.facts.capabilities.max_draft_length
        if length > limit:
            raise CapabilityError(
                f"{self.facts.name} predicts only {limit} tokens", f"use --draft-length {limit} or less"
            )

    def _known_states(self, tree: TokenTree) -> Array:
        """Return the inputs of the heads for those nodes of a tree before which the target ran all tokens.

        The root is one of them, even if the target has not run any tokens yet, to warm up.
        """
        last = max(self._log.end - self.length, 0)
        return self._states_before(sum(depth <= last for depth in tree.depths))

    def _states_before(self, count: int) -> Array:
        """Return the inputs of the heads for the next `count` tokens: the hidden states before them."""
        return self._log.rows(self.length - 1, self.length - 1 + count)

    def _predict(self, head: int, nodes: Sequence[_Node], rows: Array) -> None:
        """Compute the rows of logits of the nodes whose next token this head predicts."""
        at = [i for i, node in enumerate(nodes) if node.head == head]
        # Nodes of a Medusa tree have the same input as their parent, and so as all nodes of the same depth.
        inputs = {id(nodes[i].inputs): nodes[i].inputs for i in at}
        logits = dict(zip(inputs, self._network.logits(head, np.array([*inputs.values()])), strict=True))
        for i in at:
            rows[i] = logits[id(nodes[i].inputs)]

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._stop_logging()


class PrefixHeadView(ResidualHeadView):
    """Hydra++ heads. Instead of a hidden state, they read what a layer with a KV cache makes of it.

    The entry of the token at position p in that KV cache comes from the hidden state at position p - 1, so
    drafted tokens have none.
    """

    def __init__(
        self,
        target: BaseModel,
        log: HiddenStateLog,
        stop_logging: Callable[[], None],
        facts: ModelFacts,
        network: ResidualNetwork,
        embed: Callable[[Sequence[int]], Array] | None,
        prefix: PrefixLayer,
    ) -> None:
        super().__init__(target, log, stop_logging, facts, network, embed)
        self._prefix = prefix
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at a position. Tokens before it are never run."""
        self._check()
        self._prefix.restart(position)
        self._length = position

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._prefix.truncate(self._length)
        for batch in in_batches(tokens, _BATCH_TOKENS, progress):
            self._check_not_interrupted()
            self._prefix.append(super()._states_before(len(batch)))
            self._length += len(batch)

    def _states_before(self, count: int) -> Array:
        self._prefix.truncate(self._length)
        return self._prefix.run(super()._states_before(count))

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the tokens that were run with hidden states of the target."""
        super().commit(path)
        self._length = self._prefix.end

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._length = min(self._length, length)
        self._prefix.truncate(self._length)

    def resized(self) -> None:
        tokens = self._target.facts.context_tokens
        token_bytes = self.facts.kv_bytes // self.facts.context_tokens if self.facts.context_tokens else 0
        self.facts = replace(self.facts, context_tokens=tokens, kv_bytes=token_bytes * tokens)
