"""Which cells of a context's memory hold what: committed tokens, and the tree of an open round."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["KvCells", "UnchangedPrefix"]


@dataclass(eq=False, slots=True)
class UnchangedPrefix:
    """The cells before `until` are still those that somebody looked at when it was set."""

    until: int = 0


class KvCells:
    """The tokens in the memory of one context.

    Sequence 0 holds the `length` committed tokens. In a round every branch of the tree is a sequence of
    its own that shares the cells of its ancestors: the first child goes on with its parent's sequence,
    each further child opens a new one. Committing keeps one sequence as the new sequence 0.

    replays: the memory cannot be cut back, and whoever uses it puts it right by other means.
    """

    def __init__(self, context: LlamaContext, max_branches: int, *, replays: bool = False) -> None:
        self._length = 0
        self._tracked: list[UnchangedPrefix] = []
        self._context = context
        self._max_branches = max_branches
        self._replays = replays
        self._sequence_of: list[int] = []
        self._position_of: list[int] = []

    @property
    def length(self) -> int:
        """How many committed tokens there are."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        for unchanged in self._tracked:
            unchanged.until = min(unchanged.until, length)

    def track_prefix(self) -> UnchangedPrefix:
        """What is kept right until it is given to `unwatch`."""
        unchanged = UnchangedPrefix()
        self._tracked.append(unchanged)
        return unchanged

    def untrack_prefix(self, unchanged: UnchangedPrefix) -> None:
        """Nobody looks at it any more."""
        self._tracked.remove(unchanged)

    @property
    def is_tracked(self) -> bool:
        """Whether somebody keeps copies of these cells."""
        return bool(self._tracked)

    @property
    def open(self) -> int:
        """How many nodes of a round are there."""
        return len(self._sequence_of)

    def place_tree(self, tree: TokenTree, first: int) -> tuple[list[int], list[list[int]]]:
        """Give nodes from `first` on their positions, and the sequences that pass through each.

        Raises CapabilityError for too many branches; the round is over then.
        """
        passing: list[list[int]] = []
        parented = set(tree.parents[1:first])
        used = max(self._sequence_of, default=0)
        for node in range(first, tree.width):
            parent = tree.parents[node]
            self._position_of.append(self.length if parent < 0 else self._position_of[parent] + 1)
            if parent < 0 or parent not in parented:
                parented.add(parent)
                sequence = 0 if parent < 0 else self._sequence_of[parent]
            else:
                used += 1
                sequence = used
                self._branch(tree, parent, sequence, first, passing)
            self._sequence_of.append(sequence)
            passing.append([sequence])
        return self._position_of[first:], passing

    def _branch(
        self, tree: TokenTree, parent: int, sequence: int, first: int, passing: list[list[int]]
    ) -> None:
        """Open a sequence that shares all ancestors from `parent` up."""
        if sequence >= self._max_branches:
            self.end_round()
            raise CapabilityError(
                f"the tree has more than the {self._max_branches} branches the model was loaded for"
            )
        while parent >= first:
            passing[parent - first].append(sequence)
            parent = tree.parents[parent]
        source, end = (
            (0, self.length) if parent < 0 else (self._sequence_of[parent], self._position_of[parent] + 1)
        )
        self._context.copy(source, sequence, 0, end)

    def commit(self, path: tuple[int, ...]) -> bool:
        """Keep the root and the nodes of `path`. True when nothing was run that is not kept."""
        kept = path[-1] if path else 0
        length = self._position_of[kept] + 1
        whole = length == self._position_of[-1] + 1
        if kept == len(path):
            # The path is the first nodes of the pass: their cells lie in order already.
            self.truncate(length)
        else:
            self._context.compact_branch(self._sequence_of[kept], self.length, length)
            self.length = length
            self.clear_round()
        return whole

    def end_round(self) -> None:
        """Drop the open round, if there is one."""
        if self._sequence_of:
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens of sequence 0 and nothing of any branch."""
        if not self._replays:  # else they hold checkpoints
            self._context.drop_others()
        self.length = length
        if not self._context.drop(0, length) and not self._replays:
            # A memory that cannot be cut back: what is left of it is not the beginning of anything.
            self._context.clear()
            self.length = 0
        self.clear_round()

    def clear_round(self) -> None:
        """The context has no round any more."""
        self._sequence_of, self._position_of = [], []
