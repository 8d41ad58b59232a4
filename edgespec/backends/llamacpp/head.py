"""Run heads that take (token, hidden state) pairs, and manage their KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import HeadCells, HeadView
from edgespec.backends.llamacpp.context_planning import check_resize_fits, rebuild_context
from edgespec.backends.llamacpp.head_loading import HeadContext, HeadParts, HeadPass, HeadSlot, PairContext
from edgespec.backends.llamacpp.head_target import HeadTarget
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_sequences import export_text, import_text
from edgespec.backends.llamacpp.loading import describe
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["LlamaHeadCells", "PairHead", "describe_head"]


class LlamaHeadCells(HeadCells):
    """The KV cache of a head that llama.cpp runs.

    Attributes:
        context: The context that runs the head.
        kv: The cells of the committed tokens and of the draft tree.
    """

    def __init__(self, context: HeadContext | HeadSlot, options: LoadOptions) -> None:
        context.clear()  # A slot can hold the tokens of a closed view.
        self.context, self._options = context, options
        self.kv = KvCells(context, options.max_branches)

    @property
    def threads(self) -> int:
        return self.context.threads

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def start(self) -> int:
        first = self.context.first_position
        return self.length if first is None else first

    def restart(self, position: int) -> None:  # noqa: ARG002
        self.context.clear()

    def truncate(self, length: int) -> None:
        self.kv.truncate(length)

    def export(self, start: int, end: int) -> bytes:
        return export_text(self.context, start, end)

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        return end <= self.context.tokens and import_text(self.context, memoryview(data), start, end)

    def capacity(self, context_tokens: int) -> int:  # noqa: ARG002
        # The size of a slot never changes, so check whether its context still exists.
        return 0 if self.context.is_lost else self.context.tokens

    def resized(self, facts: ModelFacts, context_tokens: int) -> ModelFacts:
        """Resize the head's context to match the target's, or keep its size if memory is short."""
        context = self.context
        assert isinstance(context, HeadContext)  # The size of a slot never changes.
        if not context_tokens:
            # The target lost its KV cache, so free the head's as well until the target's is reallocated.
            self.kv.length = 0
            context.release()
            return facts
        before = context.plan
        plan = before.with_tokens(context_tokens)
        try:
            check_resize_fits([before], [plan], facts.weight_bytes, self._options)
        except MemoryBudgetError:
            plan = before
        try:
            self.truncate(min(self.length, plan.tokens))
            rebuild_context(context, plan, self.length)
        except (MemoryBudgetError, BackendError):
            self.kv.length = 0
        return replace(facts, context_tokens=context.plan.tokens, kv_bytes=context.plan.kv_bytes)

    def interrupt(self, enabled: bool) -> None:
        self.context.set_interrupt(enabled)


def describe_head(parts: HeadParts, capabilities: Capabilities) -> ModelFacts:
    """Return the facts of a head with its own KV cache."""
    file, plan, vocabulary = parts.file, parts.context.plan, parts.target.vocabulary
    result = ProbeResult(capabilities, "in place")
    facts = describe(file.handle, str(file.path), file.name, file.max_plan.share, vocabulary, result)
    return replace(
        facts,
        context_tokens=plan.tokens,
        kv_bytes=plan.kv_bytes,
        vocab_size=vocabulary.size,
        notice="",
    )


class PairHead(HeadView[HeadTarget]):
    """A head that takes pairs of a token and the preceding hidden state.

    The token at position p is run with the target's hidden state at position p - 1. Draft tokens have no such
    state yet, so the head uses its own hidden state instead. After verification, `commit` removes the KV
    cells of draft tokens, and the next prefill reruns accepted tokens with the target's hidden states.

    A head can be a chain of layers, each trained to predict one token further ahead than the previous one.
    The first layer predicts the children of the draft tree's root, the second predicts their children, and so
    on. The last layer also predicts all deeper nodes. Layers cannot share keys and values, so each one
    processes every token.

    Args:
        parts: The weights, the target and the context.
        encodes: Whether the head has an encoder that combines the inputs of several target layers.
        layers: Number of layers in the chain, or 1 if the head is not a chain.
    """

    _cells: LlamaHeadCells
    # Index of the layer in the chain that runs the current level of the draft tree.
    _layer = 0

    def __init__(self, parts: HeadParts, encodes: bool = False, layers: int = 1) -> None:
        options = parts.file.options
        super().__init__(parts.target, parts.log, parts.release, LlamaHeadCells(parts.context, options))
        capabilities = Capabilities(
            rollback=True,
            tree=parts.target.facts.capabilities.tree,
            max_width=parts.context.max_width,
            max_branches=options.max_branches,
        )
        self.facts = describe_head(parts, capabilities)
        self._batch_tokens = options.batch_tokens
        self._context, self._encodes, self._layers = parts.context, encodes, layers
        # The head's own hidden state after each node of the current draft tree.
        self._own_states: list[NDArray[np.float32]] = []

    def _append(self, tokens: Sequence[int]) -> None:
        for layer in range(self._layers):
            if self._layers > 1:
                # Free these tokens' KV cells, so that every layer uses the same cell for a given token.
                self._cells.truncate(self.length)
                self._select(layer)
            states = self._target_states(self.length, len(tokens))
            self._context.compute(HeadPass.chain("prefill", tokens, states, self.length))

    def _select(self, layer: int) -> None:
        """Make later passes run this layer of the chain."""
        assert isinstance(self._context, PairContext)
        self._context.select_mtp_layer(layer)

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the head's input state for each of `count` tokens, starting at position `start`."""
        states = self._logged_states(start, count)
        if not self._encodes:
            return states
        return self._context.compute(HeadPass.chain("encode", [0] * count, states, start)).states

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        if first == 0:
            self._cells.kv.end_round()
            self._own_states = []
        begin = self._begin_level(first) if self._layers > 1 else first
        positions, sequences = self._cells.kv.place_tree(tree, begin)
        states = self._states_before(tree, begin, positions)
        rows = self._context.compute(HeadPass("draft", tree.tokens[begin:], states, positions, sequences))
        self._own_states.extend(rows.states[first - begin :])
        return HostLogits(rows.logits[first - begin :])

    def _begin_level(self, first: int) -> int:
        """Switch to the draft layer for nodes at index `first` and above. Return the first node to run."""
        before, self._layer = self._layer, min(self._layer + 1, self._layers - 1) if first else 0
        self._select(self._layer)
        if first == 0 or self._layer == before:
            return first
        self._cells.kv.end_round()
        return 0

    def _states_before(self, tree: TokenTree, first: int, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return input states for nodes at index `first` and above.

        These are the target's hidden states where they are known, and the head's own otherwise.
        """
        known = 0
        if first == 0:
            # Always treat the root as known, so that warm-up works before the target has run any tokens.
            last = max(self.log.end, positions[0])
            known = self._known_nodes = sum(position <= last for position in positions)
        own = [self._own_states[tree.parents[first + node]] for node in range(known, len(positions))]
        return np.array([*(self._target_states(positions[0], known) if known else ()), *own])

    def commit(self, path: tuple[int, ...]) -> None:
        if self._layers > 1:
            # Discard these nodes, because not every layer has run them. The next prefill reruns them.
            self._known_nodes = 0
        super().commit(path)
