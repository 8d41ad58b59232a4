"""Token trees: drafts that are verified in a single pass.

Also provides `common_prefix_length`, because sequences with a common prefix can share KV cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgespec.engine.sampling import Distribution

__all__ = ["TokenTree", "TreeBuilder", "common_prefix_length"]


@dataclass(frozen=True)
class TokenTree:
    """The last emitted token (the root) and the tokens drafted after it.

    Node 0 is the root, which is not in the KV cache yet. Nodes are in topological order (`parents[i] < i`,
    `parents[0] == -1`), and siblings are in the order in which they were sampled. A chain is a tree without
    branches.

    Attributes:
        tokens: The token of each node.
        parents: The parent of each node.
        draft_probs: The distribution that each node was sampled from. None for nodes that were not sampled,
            such as n-grams.
        block_verifiable: Whether the drafter committed to a single chain before sampling any token, as block
            verification requires. The length of the chain may depend on the sampled tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_probs: tuple[Distribution | None, ...]
    block_verifiable: bool = False

    @classmethod
    def chain(
        cls,
        root: int,
        drafted: Sequence[int] = (),
        draft_probs: Sequence[Distribution | None] | None = None,
    ) -> TokenTree:
        """Return a draft tree without branches. `draft_probs` has one entry per drafted token."""
        probs = (None, *((None,) * len(drafted) if draft_probs is None else draft_probs))
        return cls((root, *drafted), tuple(range(-1, len(drafted))), probs, block_verifiable=True)

    @property
    def width(self) -> int:
        """Number of tokens in the draft tree, including the root."""
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        return len(self.tokens) - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether the draft tree has no branches."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def leaf_count(self) -> int:
        return 1 if self.is_chain else self.width - len(set(self.parents[1:]))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node in the draft tree. 0 for the root."""
        if self.is_chain:
            return tuple(range(self.width))
        depths = [0] * self.width
        for node in range(1, self.width):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    def independent_ranges(self, begin: int) -> list[tuple[int, int]]:
        """Split the nodes, starting at `begin`, into ranges (first, end) that can be run one after another.

        No range contains a node and its parent. Each range is as long as possible.
        """
        ranges = []
        while begin < self.width:
            end = begin + 1
            while end < self.width and self.parents[end] < begin:
                end += 1
            ranges.append((begin, end))
            begin = end
        return ranges

    def children(self, node: int) -> list[int]:
        """Return the children of a node, in the order in which they were sampled."""
        return [i for i in range(node + 1, len(self.parents)) if self.parents[i] == node]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that contains `token`, or None."""
        for i in range(node + 1, len(self.parents)):
            if self.parents[i] == node and self.tokens[i] == token:
                return i
        return None

    def walk(self, tokens: Sequence[int], node: int = 0) -> tuple[int, ...]:
        """Return `node` and its descendants that match `tokens`, up to the first mismatch."""
        nodes = [node]
        for token in tokens:
            child = self.child(nodes[-1], token)
            if child is None:
                break
            nodes.append(child)
        return tuple(nodes)

    def subtree(self, nodes: Sequence[int]) -> TokenTree:
        """Return a tree with only the given nodes, in this order. Parents must precede their children."""
        at = {node: i for i, node in enumerate(nodes)}
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(at.get(self.parents[node], -1) for node in nodes),
            tuple(self.draft_probs[node] for node in nodes),
            self.block_verifiable,
        )

    def padded(self, width: int) -> TokenTree:
        """Pad the tree to at least `width` nodes by repeating the last token as a chain."""
        more = width - self.width
        if more <= 0:
            return self
        return TokenTree(
            (*self.tokens, *self.tokens[-1:] * more),
            (*self.parents, *range(self.width - 1, width - 1)),
            (*self.draft_probs, *(None,) * more),
            self.block_verifiable,
        )

    def pruned(
        self, vocab_size: int, max_depth: int, max_width: int = 1 << 20, max_branches: int = 1 << 20
    ) -> TokenTree:
        """Return this tree without nodes that exceed the limits or their descendants.

        Removing valid tokens because of their id or probability would bias rejection sampling.

        Args:
            vocab_size: Token ids must be smaller than this.
            max_depth: Maximum depth of a node.
            max_width: Maximum number of nodes, including the root.
            max_branches: Maximum number of leaves.
        """
        depths = self.depths
        if (
            max(depths) <= max_depth
            and min(self.tokens) >= 0
            and max(self.tokens) < vocab_size
            and self.width <= max_width
            and (self.is_chain or self.leaf_count <= max_branches)
        ):
            return self
        kept = {-1: None}
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
        return self.subtree([node for node in kept if node >= 0])


class TreeBuilder:
    """A token tree under construction. Nodes are numbered in the order in which they are added.

    Args:
        chain: Initial tokens. The first is the root, and each is the parent of the next.
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

    def add(self, parent: int, token: int, draft_probs: Distribution | None = None) -> int:
        """Add a node below `parent` (-1 to add the root), and return its number."""
        node = len(self.tokens)
        self._places.setdefault((parent, token), node)
        self.is_chain = self.is_chain and parent == node - 1
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(draft_probs)
        return node

    def child(self, parent: int, token: int) -> int | None:
        """Return the first child of `parent` that contains `token`, or None."""
        return self._places.get((parent, token))

    def add_path(self, node: int, tokens: Sequence[int]) -> int:
        """Add a chain of tokens below `node`, reusing existing nodes, and return its last node."""
        for token in tokens:
            child = self.child(node, token)
            node = self.add(node, token) if child is None else child
        return node

    def extend(self, tree: TokenTree, first: int) -> None:
        """Append the nodes of `tree` from index `first`. Earlier nodes must already have been added."""
        for node in range(first, tree.width):
            self.add(tree.parents[node], tree.tokens[node], tree.draft_probs[node])

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes on the path from the root to `node`, excluding the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def build(self, block_verifiable: bool = False) -> TokenTree:
        """Return a token tree of all nodes added so far. See `TokenTree.block_verifiable`."""
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.draft_probs), block_verifiable)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
