"""The lower split of a LayerSkip model: it drafts, and computes the input of the upper split."""

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
    """The context of the lower layers, and the tree that it has run in the current round.

    The tree starts with the drafted nodes. `hidden_of` adds the nodes of the target's tree that the draft has
    not run. Nodes are identified by their path of tokens, so a node of both trees is run once.

    Args:
        context: The context of the lower layers.
        hook: The hook that reads the output of the last of these layers.
        exit_name: llama.cpp's name of that output.
        max_branches: The maximum number of branches of a tree.
    """

    def __init__(
        self, context: LlamaContext, hook: HiddenStateHook, exit_name: str, max_branches: int
    ) -> None:
        self.context = context
        self.cells = KvCells(context, max_branches)
        self._hook = hook
        self._exit_name = exit_name
        self._max_branches = max_branches
        self._reset()

    def _reset(self) -> None:
        self._tree = TreeBuilder()
        # For each node of the target's tree, the same node in `_tree`.
        self._nodes: list[int] = []
        # For each node of `_tree`, its hidden state.
        self._hidden: list[NDArray[np.float32]] = []

    def end_round(self) -> None:
        """Remove the tree and its cells."""
        self.cells.end_round()
        self._reset()

    def append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the cache outside a round, and return their hidden states, float32 [n, embd]."""
        count, length = len(tokens), self.cells.length
        hidden = self._run(tokens, range(length, length + count), [(0,)] * count)
        self.cells.length += count
        return hidden

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        parts = []
        for rows in self._split_rows(len(tokens)):
            self.context.run_to_hook(tokens[rows], positions[rows], sequences[rows])
            parts.append(self._hook.take(self._exit_name, len(tokens[rows])))
        return np.concatenate(parts)

    def _split_rows(self, count: int) -> list[slice]:
        """Split rows into passes that are no wider than the context supports."""
        step = self.context.max_width
        return [slice(start, start + step) for start in range(0, count, step)]

    def draft(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Run the nodes `first` and up of a draft tree through the lower layers and the output head.

        Returns:
            Logits, float32 [nodes, vocab]: a view that the next pass overwrites.
        """
        if first == 0:
            self.end_round()
        positions, sequences = self.cells.place_tree(tree, first)
        self._tree.extend(tree, first)
        tokens, parts = tree.tokens[first:], []
        for rows in self._split_rows(len(tokens)):
            logits = self.context.run(tokens[rows], positions[rows], sequences[rows])
            self._hidden += list(self._hook.take(self._exit_name, len(logits)))
            parts.append(logits if len(logits) == len(tokens) else logits.copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def hidden_of(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Return the hidden states of the nodes `first` and up of the target's tree, float32 [nodes, embd].

        Nodes that the draft or an earlier call has run are not run again.
        """
        if first == 0:
            self._nodes = []
            if self._tree.tokens[:1] != [tree.tokens[0]]:
                self.end_round()
        done = len(self._tree)
        self._map_nodes(tree, first)
        whole = self._tree.build()
        if first == 0 and done and not self._fits(whole):
            # Drafted nodes outside the target's tree take cells that it needs. Start without them.
            self.end_round()
            return self.hidden_of(tree, 0)
        if whole.width > done:
            positions, sequences = self.cells.place_tree(whole, done)
            self._hidden += list(self._run(whole.tokens[done:], positions, sequences))
        return np.stack([self._hidden[node] for node in self._nodes[first:]])

    def _map_nodes(self, tree: TokenTree, first: int) -> None:
        """Map nodes of the target's tree to nodes of `_tree`, adding the missing ones."""
        for node in range(first, tree.width):
            parent = self._nodes[tree.parents[node]] if node else -1
            self._nodes.append(self._tree.add_path(parent, tree.tokens[node : node + 1]))

    def _fits(self, tree: TokenTree) -> bool:
        room = self.context.tokens - self.cells.length
        return tree.width <= room and tree.leaf_count <= self._max_branches

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and the nodes of `path`, numbered as in the target's tree."""
        self.cells.commit(tuple(self._nodes[node] for node in path))
        self._reset()
