"""Separate the tokens that a drafter chose from those that a constraint determines."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafters.base import ForcedDraft
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["ChosenTokens"]


class ChosenTokens:
    """The tokens that a drafter chose itself. Only these count in acceptance rates and draft lengths.

    Attributes:
        tree: The draft tree without the tokens that a constraint determines. The children of such a token
            become children of the chosen token before it.
        nodes: For each node of `tree`, the corresponding node of the draft.
    """

    def __init__(self, draft: ForcedDraft) -> None:
        self._draft = draft
        tree, forced = draft
        builder = TreeBuilder(tree.tokens[:1])
        self.nodes = [0]
        chosen = [
            0
        ]  # For each node of the draft, the node of `tree` for it or the last chosen token before it.
        for node in range(1, tree.width):
            parent = chosen[tree.parents[node]]
            if node in forced:
                chosen.append(parent)
            else:
                chosen.append(builder.add(parent, tree.tokens[node], tree.draft_probs[node]))
                self.nodes.append(node)
        self.tree: TokenTree = builder.build()

    def emitted(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the emitted tokens, except for those that a constraint determines."""
        tree, forced = self._draft
        path = tree.walk(tokens)
        accepted = len(path) - 1
        chosen = [token for token, node in zip(tokens, path[1:], strict=False) if node not in forced]
        # Include the token after the accepted ones, which shows that the drafter's other tokens were
        # rejected.
        if forced.isdisjoint(tree.children(path[-1])):
            chosen += tokens[accepted : accepted + 1]
        return tuple(chosen)
