"""Track the KV cells of a context: the committed tokens, and the draft tree that is being verified."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["KvCells", "UnchangedPrefix"]


@dataclass(eq=False, slots=True)
class UnchangedPrefix:
    """The prefix of the target's cache that has not changed since a draft model copied its cells.

    Attributes:
        tokens: The number of unchanged tokens. The draft model sets it, and every rollback reduces it.
    """

    tokens: int = 0


class KvCells:
    """Manages the tokens in a context's KV cache and the sequences they belong to.

    Sequence 0 holds the `length` committed tokens. While a draft tree is being verified, each of its branches
    has a sequence that shares the cells of its ancestors. The first child of a node continues its parent's
    sequence, and each further child starts a new one. `commit` moves the accepted branch to sequence 0.
    """

    def __init__(self, context: LlamaContext, max_branches: int, *, replays: bool = False) -> None:
        self._length = 0
        self._tracked: list[UnchangedPrefix] = []
        self.context = context
        self._max_branches = max_branches
        self._replays = replays
        # The sequence and the position of each node in the uncommitted tree.
        self._sequences: list[int] = []
        self._positions: list[int] = []

    @property
    def length(self) -> int:
        """The number of committed tokens."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        for prefix in self._tracked:
            prefix.tokens = min(prefix.tokens, length)

    def track_prefix(self) -> UnchangedPrefix:
        """Return an object that tracks how many cached tokens stay unchanged, until `untrack_prefix`."""
        prefix = UnchangedPrefix()
        self._tracked.append(prefix)
        return prefix

    def untrack_prefix(self, prefix: UnchangedPrefix) -> None:
        """Stop updating a prefix returned by `track_prefix`."""
        self._tracked.remove(prefix)

    @property
    def is_tracked(self) -> bool:
        """Whether a draft model uses copies of these cells."""
        return bool(self._tracked)

    def place_tree(self, tree: TokenTree, first: int) -> tuple[list[int], list[list[int]]]:
        """Return the positions and sequence ids of the tree's nodes, starting at index `first`.

        Raises:
            CapabilityError: The tree has too many branches. The uncommitted tree is removed.
        """
        passing: list[list[int]] = []
        continued = set(tree.parents[1:first])
        last_sequence = max(self._sequences, default=0)
        for node in range(first, tree.width):
            parent = tree.parents[node]
            self._positions.append(self.length if parent < 0 else self._positions[parent] + 1)
            if parent < 0 or parent not in continued:
                continued.add(parent)
                sequence = 0 if parent < 0 else self._sequences[parent]
            else:
                last_sequence += 1
                sequence = last_sequence
                self._open_branch(tree, parent, sequence, first, passing)
            self._sequences.append(sequence)
            passing.append([sequence])
        return self._positions[first:], passing

    def _open_branch(
        self, tree: TokenTree, parent: int, sequence: int, first: int, passing: list[list[int]]
    ) -> None:
        """Start a new sequence that shares the cells of `parent` and its ancestors."""
        if sequence >= self._max_branches:
            self.end_round()
            raise CapabilityError(
                f"the draft tree has more than {self._max_branches} branches", "use a larger --draft-branches"
            )
        # Ancestors in the same batch have no KV cells to share yet. Assign their tokens in the batch to the
        # new sequence too.
        while parent >= first:
            passing[parent - first].append(sequence)
            parent = tree.parents[parent]
        source, end = (
            (0, self.length) if parent < 0 else (self._sequences[parent], self._positions[parent] + 1)
        )
        self.context.copy(source, sequence, 0, end)

    def commit(self, path: tuple[int, ...]) -> bool:
        """Commit the root and the nodes in `path`, and remove all other nodes of the tree.

        Returns:
            Whether all nodes of the tree were committed.
        """
        last = path[-1] if path else 0
        length = self._positions[last] + 1
        kept_all = length == self._positions[-1] + 1
        if last == len(path):
            # The path consists of the first nodes in the tree, so its cells are already contiguous.
            self.truncate(length)
        else:
            self.context.compact_branch(self._sequences[last], self.length, length)
            self.length = length
            self.clear_round()
        return kept_all

    def end_round(self) -> None:
        """Remove the cells of the uncommitted tree, if there is one."""
        if self._sequences:
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Truncate sequence 0 to `length` tokens and remove all branches.

        If the cache cannot be rolled back and no checkpoints are used, it is cleared instead.
        """
        # Remove the other sequences, unless they contain checkpoints for replay.
        if not self._replays:
            self.context.drop_others()
        self.length = length
        if not self.context.drop(0, length) and not self._replays:
            # The recurrent state still includes the removed tokens, so it is invalid for any prefix.
            self.context.clear()
            self.length = 0
        self.clear_round()

    def clear_round(self) -> None:
        """Stop tracking the uncommitted tree. The caller must already have committed or removed its cells."""
        self._sequences, self._positions = [], []
