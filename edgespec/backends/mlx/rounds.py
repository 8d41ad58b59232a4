"""What a round holds so far: the nodes of a tree that were run after the committed tokens."""

from __future__ import annotations

from itertools import takewhile

from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["Round"]


class Round(TreeBuilder):
    """Nodes in the order in which they were run."""

    __slots__ = ()

    def shared(self, tree: TokenTree) -> int:
        """How many nodes a tree has in common with this round, from the root on."""
        mine = zip(self.tokens, self.parents, strict=True)
        its = zip(tree.tokens, tree.parents, strict=True)
        return sum(takewhile(bool, (a == b for a, b in zip(mine, its, strict=False))))
