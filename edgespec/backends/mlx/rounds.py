"""What a round holds so far: the nodes of a tree that were run after the committed tokens."""

from __future__ import annotations

from itertools import takewhile

from edgespec.engine.tree import TokenTree

__all__ = ["Round"]


class Round:
    """Nodes in the order in which they were run; node i stands `depths[i]` after the root."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tree: TokenTree, first: int) -> None:
        """Nodes `first` and up of a tree whose others are here."""
        for parent in tree.parents[first:]:
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.tokens.extend(tree.tokens[first:])

    @property
    def is_chain(self) -> bool:
        """Whether there are no branches so far."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def shared(self, tree: TokenTree) -> int:
        """How many nodes a tree has in common with this round, from the root on."""
        mine = zip(self.tokens, self.parents, strict=True)
        its = zip(tree.tokens, tree.parents, strict=True)
        return sum(takewhile(bool, (a == b for a, b in zip(mine, its, strict=False))))
