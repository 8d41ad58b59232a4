"""The cells of a context's KV cache: committed tokens, and the tree of an open round."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["KvCells", "UnchangedPrefix"]


@dataclass(eq=False, slots=True)
class UnchangedPrefix:
    """The length of the prefix that has not changed since a draft model copied its cells.

    Attributes:
        tokens: The number of unchanged tokens. The draft model sets it; every rollback lowers it.
    """

    tokens: int = 0


class KvCells:
    """The tokens in the KV cache of one context.

    Sequence 0 holds the `length` committed tokens. During a round every branch of the tree has a sequence
    that shares the cells of its ancestors. The first child continues its parent's sequence, and each further
    child opens a new one. A commit makes one of these sequences the new sequence 0.

    Args:
        context: The context whose cells these are.
        max_branches: The maximum number of sequences of a round.
        replays: The memory cannot be truncated exactly, and a `ReplayModel` restores it from checkpoints.
    """

    def __init__(self, context: LlamaContext, max_branches: int, *, replays: bool = False) -> None:
        self._length = 0
        self._tracked: list[UnchangedPrefix] = []
        self._context = context
        self._max_branches = max_branches
        self._replays = replays
        # Sequence and position of each node of the round.
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
        """Return a prefix whose length is reduced on every rollback, until `untrack_prefix`."""
        prefix = UnchangedPrefix()
        self._tracked.append(prefix)
        return prefix

    def untrack_prefix(self, prefix: UnchangedPrefix) -> None:
        """Stop updating a prefix from `track_prefix`."""
        self._tracked.remove(prefix)

    @property
    def is_tracked(self) -> bool:
        """Whether a draft model holds copies of these cells."""
        return bool(self._tracked)

    def place_tree(self, tree: TokenTree, first: int) -> tuple[list[int], list[list[int]]]:
        """Assign positions and sequences to the nodes `first` and up of a tree.

        Returns:
            The position of each of these nodes, and the sequences that pass through it.

        Raises:
            CapabilityError: The tree has too many branches. The round is closed.
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
        """Open a sequence that shares the cells of `parent` and its ancestors."""
        if sequence >= self._max_branches:
            self.end_round()
            raise CapabilityError(
                f"the draft tree has more than {self._max_branches} branches",
                "load the model with a larger --draft-branches",
            )
        # Ancestors of this call are not in the cache yet: their rows carry the new sequence too.
        while parent >= first:
            passing[parent - first].append(sequence)
            parent = tree.parents[parent]
        source, end = (
            (0, self.length) if parent < 0 else (self._sequences[parent], self._positions[parent] + 1)
        )
        self._context.copy(source, sequence, 0, end)

    def commit(self, path: tuple[int, ...]) -> bool:
        """Keep the root and the nodes of `path`, and close the round.

        Returns:
            Whether every node of the round was kept.
        """
        last = path[-1] if path else 0
        length = self._positions[last] + 1
        kept_all = length == self._positions[-1] + 1
        if last == len(path):
            # The path consists of the first nodes of the pass, so its cells are contiguous already.
            self.truncate(length)
        else:
            self._context.compact_branch(self._sequences[last], self.length, length)
            self.length = length
            self.clear_round()
        return kept_all

    def end_round(self) -> None:
        """Remove the cells of the open round, if there is one."""
        if self._sequences:
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of sequence 0 and remove all branches.

        A memory without rollback is cleared, unless checkpoints restore it.
        """
        if not self._replays:  # the other sequences hold checkpoints then
            self._context.drop_others()
        self.length = length
        if not self._context.drop(0, length) and not self._replays:
            # The remaining state includes the removed tokens, so it belongs to no prefix.
            self._context.clear()
            self.length = 0
        self.clear_round()

    def clear_round(self) -> None:
        """Forget the open round, whose cells the caller has handled."""
        self._sequences, self._positions = [], []
