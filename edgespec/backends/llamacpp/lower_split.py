"""Run the lower split of a LayerSkip model, which drafts and computes the input of the upper split."""

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
    """Runs the lower layers and stores the hidden states of the uncommitted token tree.

    The drafted nodes come first. `hidden_of` adds nodes from the target's tree that were not drafted. Nodes
    are identified by the tokens on the path from the root, so a node that is in both trees runs only once.
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
        # The index in `_tree` of each node in the target's tree.
        self._nodes: list[int] = []
        # The hidden state of each node in `_tree`.
        self._hidden: list[NDArray[np.float32]] = []

    def end_round(self) -> None:
        """Remove the uncommitted tree and its cells."""
        self.cells.end_round()
        self._reset()

    def append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append committed tokens to the cache and return their hidden states, float32 [n, embd]."""
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
        """Split `count` rows into passes that do not exceed the context's maximum width."""
        step = self.context.max_width
        return [slice(start, start + step) for start in range(0, count, step)]

    def draft(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Run a draft tree's nodes, starting at index `first`, through the lower layers and the output head.

        Returns:
            The logits, float32 [nodes, vocab]. This may be a view that the next pass overwrites.
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
        """Return the hidden states of the nodes in the target's tree, starting at index `first`.

        Nodes that were drafted, or run by an earlier call, are not run again.

        Returns:
            The hidden states, float32 [nodes, embd].
        """
        if first == 0:
            self._nodes = []
            if self._tree.tokens[:1] != [tree.tokens[0]]:
                self.end_round()
        done = len(self._tree)
        self._map_nodes(tree, first)
        whole = self._tree.build()
        if first == 0 and done and not self._fits(whole):
            # Drafted nodes that the target does not verify occupy cells that its tree needs. Start over
            # without the draft.
            self.end_round()
            return self.hidden_of(tree, 0)
        if whole.width > done:
            positions, sequences = self.cells.place_tree(whole, done)
            self._hidden += list(self._run(whole.tokens[done:], positions, sequences))
        return np.stack([self._hidden[node] for node in self._nodes[first:]])

    def _map_nodes(self, tree: TokenTree, first: int) -> None:
        """Map the nodes of the target's tree to nodes in `_tree`, and add the missing ones."""
        for node in range(first, tree.width):
            parent = self._nodes[tree.parents[node]] if node else -1
            self._nodes.append(self._tree.add_path(parent, tree.tokens[node : node + 1]))

    def _fits(self, tree: TokenTree) -> bool:
        room = self.context.tokens - self.cells.length
        return tree.width <= room and tree.leaf_count <= self._max_branches

    def commit(self, path: tuple[int, ...]) -> None:
        """Commit the root and the nodes in `path`, which are indices into the target's tree."""
        self.cells.commit(tuple(self._nodes[node] for node in path))
        self._reset()
