"""The lower layers of a model in two halves: what the upper ones are given, and what drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.hidden_state_hook import HiddenStateHook
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["LowerSplit"]


class LowerSplit:
    """The context of the lower layers and the tree it holds in a round.

    Its tree is that of the draft, if there was one, and then whatever else the target wants to know. A
    node is a token after a path, so what the draft has run is found again wherever the target has it.
    """

    def __init__(
        self, context: LlamaContext, hook: HiddenStateHook, exit_name: str, max_branches: int
    ) -> None:
        self.context = context
        self.cells = KvCells(context, max_branches)
        self._hook = hook
        self._exit_name = exit_name
        self._max_branches = max_branches
        self._forget()

    def _forget(self) -> None:
        self._tree = TreeBuilder()
        # Of the target's nodes, in its order.
        self._nodes: list[int] = []
        self._hidden: list[NDArray[np.float32]] = []

    def end_round(self) -> None:
        """Drop the tree."""
        self.cells.end_round()
        self._forget()

    def append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run tokens after the cached ones, outside a round: their hidden states, float32 [n, embd]."""
        count, length = len(tokens), self.cells.length
        hidden = self._run(tokens, range(length, length + count), [(0,)] * count)
        self.cells.length += count
        return hidden

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        parts = []
        for piece in self._pieces(len(tokens)):
            self.context.run_to_hook(tokens[piece], positions[piece], sequences[piece])
            parts.append(self._hook.take(self._exit_name, len(tokens[piece])))
        return np.concatenate(parts)

    def _pieces(self, count: int) -> list[slice]:
        """So many rows in passes that the context takes."""
        step = self.context.max_width
        return [slice(start, start + step) for start in range(0, count, step)]

    def draft(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Run nodes `first` and up and leave early: logits float32 [n, vocab], a view until the next pass."""
        if first == 0:
            self.end_round()
        positions, sequences = self.cells.place_tree(tree, first)
        self._tree.extend(tree, first)
        tokens, parts = tree.tokens[first:], []
        for piece in self._pieces(len(tokens)):
            rows = self.context.run(tokens[piece], positions[piece], sequences[piece])
            self._hidden += list(self._hook.take(self._exit_name, len(rows)))
            parts.append(rows if len(rows) == len(tokens) else rows.copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def hidden_of(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """The hidden states of the target's nodes `first` and up: float32 [n, embd].

        What the draft has run, and the earlier nodes, are not run again.
        """
        if first == 0:
            self._nodes = []
            if self._tree.tokens[:1] != [tree.tokens[0]]:
                self.end_round()
        run = len(self._tree)
        self._find(tree, first)
        whole = self._tree.build()
        if first == 0 and run and not self._fits(whole):
            # The draft's other nodes take the place this tree needs.
            self.end_round()
            return self.hidden_of(tree, 0)
        if whole.width > run:
            positions, sequences = self.cells.place_tree(whole, run)
            self._hidden += list(self._run(whole.tokens[run:], positions, sequences))
        return np.stack([self._hidden[node] for node in self._nodes[first:]])

    def _find(self, tree: TokenTree, first: int) -> None:
        """Where the target's nodes are in this tree; those it lacks are added."""
        for node in range(first, tree.width):
            parent = self._nodes[tree.parents[node]] if node else -1
            self._nodes.append(self._tree.add_path(parent, tree.tokens[node : node + 1]))

    def _fits(self, tree: TokenTree) -> bool:
        room = self.context.tokens - self.cells.length
        return tree.width <= room and tree.leaf_count <= self._max_branches

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and these of the target's nodes."""
        self.cells.commit(tuple(self._nodes[node] for node in path))
        self._forget()
