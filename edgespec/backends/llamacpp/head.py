"""Base classes for heads with their own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import CachedHeadView
from edgespec.backends.llamacpp.head_context import HeadContext, HeadPass
from edgespec.backends.llamacpp.head_loading import HeadParts
from edgespec.backends.llamacpp.head_target import HeadTarget
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_sequences import export_text, import_text
from edgespec.backends.llamacpp.loading import describe
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.resizing import check_resize_fits, rebuild_context
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, ContextFullError, MemoryBudgetError
from edgespec.model.memory_check import check_draft_width, check_tokens_fit
from edgespec.model.model_facts import Capabilities

__all__ = ["CachedHead", "PairHead"]


class CachedHead(CachedHeadView[HeadTarget]):
    """A head with its own KV cache that llama.cpp runs.

    Args:
        parts: The weights, the target and the context.
        capabilities: What the head can draft.
    """

    def __init__(self, parts: HeadParts, capabilities: Capabilities) -> None:
        target, context, weights = parts.target, parts.context, parts.weights
        super().__init__(target, parts.log, parts.release)
        self._options, self._context = weights.options, context
        self._batch_tokens = weights.options.batch_tokens
        context.clear()  # A slot can hold the tokens of a closed view.
        self._cells = KvCells(context, weights.options.max_branches)
        result = ProbeResult(capabilities, "in place")
        facts = describe(
            weights.handle,
            str(weights.path),
            weights.name,
            weights.max_plan.share,
            self.vocabulary,
            result,
        )
        self.facts = replace(
            facts,
            context_tokens=context.plan.tokens,
            kv_bytes=context.plan.kv_bytes,
            vocab_size=self.vocabulary.size,
            notice="",
        )

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return max(0, self._context.tokens - self.length)

    @property
    def threads(self) -> int:
        return self._context.threads

    @property
    def _first_cached(self) -> int:
        first = self._context.first_position
        return self.length if first is None else first

    def _restart(self, position: int) -> None:
        self._context.clear()
        self._keep(position)

    def _export(self, start: int, end: int) -> bytes:
        return export_text(self._context, start, end)

    def _import(self, start: int, end: int, data: bytes) -> bool:
        return end <= self._context.tokens and import_text(self._context, memoryview(data), start, end)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        self._cells.truncate(length)

    def resized(self) -> None:
        """Resize the head's context to match the target's, or keep its size if memory is short."""
        tokens, context = self._target.facts.context_tokens, self._context
        assert isinstance(context, HeadContext)  # The size of a slot never changes.
        if not tokens:
            # The target lost its KV cache, so free the head's as well until the target's is reallocated.
            self._cells.length = 0
            context.release()
            return
        before = context.plan
        plan = before.with_tokens(tokens)
        try:
            check_resize_fits([before], [plan], self.facts.weight_bytes, self._options)
        except MemoryBudgetError:
            plan = before
        try:
            self._keep(min(self.length, plan.tokens))
            rebuild_context(context, plan, self.length)
        except (MemoryBudgetError, BackendError):
            self._cells.length = 0
        self.facts = replace(self.facts, context_tokens=context.plan.tokens, kv_bytes=context.plan.kv_bytes)

    def interrupt(self, enabled: bool) -> None:
        self._context.set_interrupt(enabled)


class PairHead(CachedHead):
    """A head that takes pairs of a token and the preceding hidden state.

    The token at position p is run with the target's hidden state at position p - 1. Draft tokens have no such
    state yet, so the head uses its own hidden state instead. After verification, `commit` removes the KV
    cells of draft tokens, and the next prefill reruns accepted tokens with the target's hidden states.

    Args:
        parts: The weights, the target and the context.
        encodes: Whether the head has an encoder that combines the inputs of several target layers.
    """

    def __init__(self, parts: HeadParts, encodes: bool = False) -> None:
        capabilities = Capabilities(
            rollback=True,
            tree=parts.target.facts.capabilities.tree,
            max_width=parts.context.max_width,
            max_branches=parts.weights.options.max_branches,
        )
        super().__init__(parts, capabilities)
        self._encodes = encodes
        # The head's own hidden state after each node of the current draft tree.
        self._own_states: list[NDArray[np.float32]] = []

    def _append(self, tokens: Sequence[int]) -> None:
        states = self._target_states(self.length, len(tokens))
        self._context.compute(HeadPass.chain("prefill", tokens, states, self.length))

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the head's input states for `count` tokens, one per token, starting at position `start`."""
        states = self._logged_states(start, count)
        if not self._encodes:
            return states
        return self._context.compute(HeadPass.chain("encode", [0] * count, states, start)).states

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            check_draft_width(tree.width, self.facts.capabilities.max_width)
            if first == 0:
                self._cells.end_round()
                self._own_states = []
            return HostLogits(self._run_tree(tree, first))
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise

    def _run_tree(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Run a tree's nodes, starting at `first`, store their hidden states, and return their logits."""
        positions, sequences = self._cells.place_tree(tree, first)
        states = self._states_before(tree, first, positions)
        rows = self._context.compute(HeadPass("draft", tree.tokens[first:], states, positions, sequences))
        self._own_states.extend(rows.states)
        return rows.logits

    def _states_before(self, tree: TokenTree, first: int, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return input states for the nodes from `first` on: the target's if known, else the head's own."""
        known = 0
        if first == 0:
            # Always treat the root as known, so that warm-up works before the target has run any tokens.
            last = max(self.log.end, positions[0])
            known = self._known_nodes = sum(position <= last for position in positions)
        own = [self._own_states[tree.parents[first + node]] for node in range(known, len(positions))]
        return np.array([*(self._target_states(positions[0], known) if known else ()), *own])

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep only the KV cells that were computed from the target's hidden states."""
        self._check()
        if self._known_nodes:
            self._cells.commit(tuple(range(1, self._known_nodes)))
        self._keep(self.length)
