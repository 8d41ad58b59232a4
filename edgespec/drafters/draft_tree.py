"""A tree of draft tokens that is being built by a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.distribution import Distribution
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["DraftTree"]


class DraftTree:
    """A draft tree under construction, and the part of it that the draft model runs.

    The draft model runs the tokens missing from its KV cache, followed by the nodes to expand. It does not
    run leaves.

    Args:
        last_token: The last emitted token, which is the root of the draft.
        lag: Tokens missing from the draft model's KV cache, ending with `last_token`.

    Attributes:
        drafted: The draft tree. Node 0 is the root.
        path_probs: For each drafted node, the estimated probability that it and all its ancestors are
            accepted.
        model_tree: The tree that the draft model runs. It consists of `lag` and the nodes to expand.
        model_tree_run: Number of nodes in `model_tree` that the model has run.
        model_nodes: For each drafted node, the corresponding node in `model_tree`, or None if it is not
            expanded.
        draws: For each node, the draft model's highest next-token probabilities, and the tokens drawn from
            them.
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
            probs: The distribution from which the token was drawn. None for greedy drafts.
            path_prob: Estimated probability that the token and all its ancestors are accepted.
            expands: Whether the draft model will run the token. If True, the parent must also be expanded.
        """
        model_parent = self.model_nodes[parent]
        model_node = None
        if expands and model_parent is not None:
            model_node = self.model_tree.add(model_parent, token)
        self.model_nodes.append(model_node)
        self.path_probs.append(path_prob)
        return self.drafted.add(parent, token, probs)

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens on the path to `node`, excluding the root."""
        return [self.drafted.tokens[each] for each in self.drafted.path(node)]

    def walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Follow `tokens` from the root as far as they were drafted, and return the visited nodes."""
        return self.drafted.build().walk(tokens)

    def model_path(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the `model_tree` nodes to commit: `lag` without its first token, and `nodes` already run."""
        path = list(range(1, self._lag_tokens))
        for node in nodes:
            model_node = self.model_nodes[node]
            if model_node is None or model_node >= self.model_tree_run:
                break
            path.append(model_node)
        return tuple(path)

    def tree(self, block: bool) -> TokenTree:
        """Return the draft tree, ordered so that the nodes run by the draft model come first.

        If the target shares layers with the draft model, this order lets it reuse their results. Siblings
        keep their order. The order does not depend on which tokens were drawn, so cutting off the draft after
        any node causes no bias.
        """
        order = sorted(range(len(self.drafted)), key=lambda node: self.model_nodes[node] is None)
        return self.drafted.build(block).subtree(order)
