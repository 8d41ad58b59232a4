"""The draft as a token tree: what one verify pass holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.engine.distribution import Distribution

__all__ = ["TokenTree"]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A root and the tokens guessed after it.

    Node 0 is the root: the last emitted token, which no cache holds yet. Nodes are in topological
    order (`parents[i] < i`, `parents[0] == -1`), siblings in the order they were drawn. A chain is a
    tree without branches; the root alone is plain decoding.

    `laws[i]` is the law node i was really drawn from, given that its earlier siblings were not it;
    None means it was proposed for certain (n-gram, greedy). Only rejection mode reads it.

    `block` vouches that this was to be one chain, whatever was drawn; only its end may depend on that.
    Block verification spends on one chain what it saves on another, so it must not be chosen by luck.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    laws: tuple[Distribution | None, ...]
    block: bool = False

    @classmethod
    def chain(
        cls, root: int, drafted: Sequence[int] = (), laws: Sequence[Distribution | None] | None = None
    ) -> TokenTree:
        """The tree without branches; `laws` has one entry for each drafted token."""
        return cls(
            (root, *drafted),
            tuple(range(-1, len(drafted))),
            (None, *(laws if laws is not None else (None,) * len(drafted))),
            block=True,
        )

    @property
    def width(self) -> int:
        """Rows of the verify pass: drafted tokens + 1."""
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """How many tokens were guessed."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """True when no node has two children."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def leaves(self) -> int:
        """How many nodes have no child."""
        return self.width - len(set(self.parents[1:]))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; the root has depth 0."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    def children(self, node: int) -> list[int]:
        """The children of a node, in the order they were drawn."""
        return [i for i in range(node + 1, len(self.parents)) if self.parents[i] == node]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, or None."""
        for i in range(node + 1, len(self.parents)):
            if self.parents[i] == node and self.tokens[i] == token:
                return i
        return None

    def pruned(
        self, vocab_size: int, max_depth: int, max_width: int = 1 << 20, max_branches: int = 1 << 20
    ) -> TokenTree:
        """This tree without tokens outside the vocabulary, nodes too deep, too many or one branch too much.

        Their heirs go with them. Whether a node of the vocabulary stays never depends on its own token, only
        on the nodes before it: a draft chosen by what was drawn would bias rejection mode.
        """
        depths = self.depths
        if (
            max(depths) <= max_depth
            and min(self.tokens) >= 0
            and max(self.tokens) < vocab_size
            and self.width <= max_width
            and (self.is_chain or self.leaves <= max_branches)
        ):
            return self
        renumbered = {-1: -1}
        parents: set[int] = set()
        branches = 1
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if len(renumbered) > max_width:
                break
            branching = parent in parents
            if branching and branches == max_branches:
                continue
            if parent in renumbered and depths[i] <= max_depth and 0 <= token < vocab_size:
                renumbered[i] = len(renumbered) - 1
                parents.add(parent)
                branches += branching
        kept = [i for i in renumbered if i >= 0]
        return TokenTree(
            tuple(self.tokens[i] for i in kept),
            tuple(renumbered[self.parents[i]] for i in kept),
            tuple(self.laws[i] for i in kept),
            self.block,
        )
