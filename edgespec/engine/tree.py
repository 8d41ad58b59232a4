"""The draft as a token tree: what one verify pass holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgespec.engine.distribution import Distribution

__all__ = ["TokenTree", "TreeBuilder"]


# Without slots: its shape is asked for several times a round, and kept once found.
@dataclass(frozen=True)
class TokenTree:
    """A root and the tokens guessed after it.

    Node 0 is the root: the last emitted token, which no cache holds yet. Nodes are in topological
    order (`parents[i] < i`, `parents[0] == -1`), siblings in the order they were drawn. A chain is a
    tree without branches; the root alone is plain decoding.

    `draft_probs[i]` is the law node i was really drawn from, given that its earlier siblings were not it;
    None means it was proposed for certain (n-gram, greedy). Only rejection mode reads it.

    `block` vouches that this was to be one chain, whatever was drawn; only its end may depend on that.
    Block verification spends on one chain what it saves on another, so it must not be chosen by luck.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: tuple[Distribution | None, ...]
    block: bool = False

    @classmethod
    def chain(
        cls, root: int, drafted: Sequence[int] = (), draft_probs: Sequence[Distribution | None] | None = None
    ) -> TokenTree:
        """The tree without branches; `draft_probs` has one entry for each drafted token."""
        return cls(
            (root, *drafted),
            tuple(range(-1, len(drafted))),
            (None, *(draft_probs if draft_probs is not None else (None,) * len(drafted))),
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

    @cached_property
    def is_chain(self) -> bool:
        """True when no node has two children."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def leaves(self) -> int:
        """How many nodes have no child."""
        return 1 if self.is_chain else self.width - len(set(self.parents[1:]))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; the root has depth 0."""
        if self.is_chain:
            return tuple(range(self.width))
        depths = [0] * self.width
        for node in range(1, self.width):
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

    def walk(self, tokens: Sequence[int], node: int = 0) -> tuple[int, ...]:
        """The nodes that hold these tokens one after the other below `node`, as far as there are any.

        `node` itself comes first: one node more than tokens were found.
        """
        nodes = [node]
        for token in tokens:
            child = self.child(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return tuple(nodes)

    def only(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of these nodes, in this order: each after its parent, siblings as they were drawn."""
        at = {node: i for i, node in enumerate(nodes)}
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(at.get(self.parents[node], -1) for node in nodes),
            tuple(self.draft_probs[node] for node in nodes),
            self.block,
        )

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
        kept = {-1: None}  # the root's parent, then what stays, in its order
        parents: set[int] = set()
        branches = 1
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if len(kept) > max_width:
                break
            branching = parent in parents
            if branching and branches == max_branches:
                continue
            if parent in kept and depths[i] <= max_depth and 0 <= token < vocab_size:
                kept[i] = None
                parents.add(parent)
                branches += branching
        return self.only([node for node in kept if node >= 0])


class TreeBuilder:
    """A token tree in the making: nodes as in TokenTree, in the order in which they are added.

    chain: the tokens it begins with, each the parent of the next; the first one is the root.
    """

    __slots__ = ("_places", "depths", "draft_probs", "is_chain", "parents", "tokens")

    def __init__(self, chain: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.draft_probs: list[Distribution | None] = []
        self.depths: list[int] = []
        self.is_chain = True
        self._places: dict[tuple[int, int], int] = {}
        for token in chain:
            self.add(len(self) - 1, token)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, law: Distribution | None = None) -> int:
        """A new node below `parent` (-1: the root), and which one it is. It may have a sibling's token."""
        node = len(self.tokens)
        self._places.setdefault((parent, token), node)
        self.is_chain = self.is_chain and parent == node - 1
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(law)
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The first child of `parent` that holds `token`, or None."""
        return self._places.get((parent, token))

    def grow(self, node: int, tokens: Sequence[int]) -> int:
        """Put a path below `node`; what stands there already is shared. Where it ends."""
        for token in tokens:
            child = self.child(node, token)
            node = self.add(node, token) if child is None else child
        return node

    def extend(self, tree: TokenTree, first: int) -> None:
        """Nodes `first` and up of a tree whose others are here, under the same numbers."""
        for node in range(first, tree.width):
            self.add(tree.parents[node], tree.tokens[node], tree.draft_probs[node])

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes after the root down to `node`."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def tree(self, block: bool = False) -> TokenTree:
        """What has grown so far."""
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.draft_probs), block)
