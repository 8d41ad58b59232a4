"""The token tree of a draft model while it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["DraftTree"]


class DraftTree:
    """A draft while it grows, and the part of it that the draft model runs.

    The draft model runs only nodes that get children, and before them the tokens that its cache lacks.

    Args:
        last_token: The last emitted token, which is the root of the draft.
        lag: Tokens that the draft model's cache lacks, ending with `last_token`.

    Attributes:
        drafted: The draft. Node 0 is the root.
        path_probs: Per drafted node, the estimated probability that its path is accepted.
        model_tree: The tree that the draft model runs: the lag, then the nodes that get children.
        model_tree_run: Nodes of `model_tree` that the model has run.
        model_nodes: Per drafted node, its node in `model_tree`; None if it gets no children.
        draws: By node, the draft model's largest probabilities after it and the tokens drawn there.
    """

    def __init__(self, last_token: int, lag: Sequence[int]) -> None:
        self.drafted = TreeBuilder([last_token])
        self.path_probs = [1.0]
        self.model_tree = TreeBuilder(lag)
        self.model_tree_run = 0
        self.model_nodes: list[int | None] = [len(lag) - 1]
        self.draws: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
        self._lag_tokens = len(lag)

    def add(
        self, parent: int, token: int, probs: Distribution | None, path_prob: float, expands: bool
    ) -> int:
        """Add a drafted token and return its node.

        Args:
            parent: The parent node.
            token: The token.
            probs: The distribution that the token was drawn from; None for greedy drafts.
            path_prob: Estimated probability that the token and all its ancestors are accepted.
            expands: Whether the draft model is to run the token, which requires that it runs the parent.
        """
        model_parent = self.model_nodes[parent]
        model_node = None
        if expands and model_parent is not None:
            model_node = self.model_tree.add(model_parent, token)
        self.model_nodes.append(model_node)
        self.path_probs.append(path_prob)
        return self.drafted.add(parent, token, probs)

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens from below the root down to `node`."""
        return [self.drafted.tokens[each] for each in self.drafted.path(node)]

    def walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the drafted nodes along `tokens`, beginning with the root."""
        return self.drafted.build().walk(tokens)

    def model_path(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes of `model_tree` to commit: the lag after its first token, then the run `nodes`."""
        path = list(range(1, self._lag_tokens))
        for node in nodes:
            model_node = self.model_nodes[node]
            if model_node is None or model_node >= self.model_tree_run:
                break
            path.append(model_node)
        return tuple(path)

    def tree(self, block: bool) -> TokenTree:
        """Return the draft, with the nodes that the model runs first.

        A target that shares computation with the draft model reuses these. Siblings keep their order. A
        node's place does not depend on its own token, so a draft may be cut at any place.
        """
        order = sorted(range(len(self.drafted)), key=lambda node: self.model_nodes[node] is None)
        return self.drafted.build(block).subtree(order)
