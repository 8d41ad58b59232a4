"""Track the cells of a context: the committed tokens, the draft tree being verified, and checkpoints."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.kv_sequences import KvSequences
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError

__all__ = ["Checkpoint", "Checkpoints", "KvCells", "UnchangedPrefix"]


@dataclass(eq=False, slots=True)
class UnchangedPrefix:
    """Tracks the prefix of the target's KV cache that has not changed since a draft model copied it.

    Attributes:
        tokens: Length of the prefix. Set by the draft model after copying, and reduced when the target rolls
            back.
    """

    tokens: int = 0


class KvCells:
    """Manages the tokens in a context's KV cache and the llama.cpp sequences that they belong to.

    Sequence 0 holds the `length` committed tokens. While a draft tree is being verified, each of its branches
    has a sequence that shares the KV cells of its ancestors. The first child of a node continues its parent's
    sequence, and each further child starts a new one. `commit` moves the accepted branch to sequence 0.
    """

    def __init__(self, context: KvSequences, max_branches: int, *, replays: bool = False) -> None:
        self._length = 0
        self._tracked: list[UnchangedPrefix] = []
        self.context = context
        self._max_branches = max_branches
        self._replays = replays
        # The llama.cpp sequence and the position of each node in the token tree being verified.
        self._sequences: list[int] = []
        self._positions: list[int] = []

    @property
    def length(self) -> int:
        """The number of committed tokens in the KV cache."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        self.context.forget_images(length)
        for prefix in self._tracked:
            prefix.tokens = min(prefix.tokens, length)

    def track_prefix(self) -> UnchangedPrefix:
        prefix = UnchangedPrefix()
        self._tracked.append(prefix)
        return prefix

    def untrack_prefix(self, prefix: UnchangedPrefix) -> None:
        """Stop updating an `UnchangedPrefix` that `track_prefix` returned."""
        self._tracked.remove(prefix)

    @property
    def is_tracked(self) -> bool:
        """Whether a draft model uses a copy of the KV cache."""
        return bool(self._tracked)

    def place_tree(self, tree: TokenTree, first: int) -> tuple[list[int], list[list[int]]]:
        """Assign positions and sequence ids to a tree's nodes, starting at the node `first`, and return them.

        Raises:
            CapabilityError: The tree has too many branches.
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
        """Start a new llama.cpp sequence that shares the KV cells of the node `parent` and its ancestors."""
        if sequence >= self._max_branches:
            self.end_round()
            raise CapabilityError(
                f"the draft tree exceeds the limit of {self._max_branches} branches",
                "raise the limit with --draft-branches",
                code="draft_too_wide",
            )
        # Ancestors in the current batch have no KV cells to share yet, so add them to the new sequence here.
        while parent >= first:
            passing[parent - first].append(sequence)
            parent = tree.parents[parent]
        source, end = (
            (0, self.length) if parent < 0 else (self._sequences[parent], self._positions[parent] + 1)
        )
        self.context.copy(source, sequence, 0, end)

    def commit(self, path: tuple[int, ...]) -> bool:
        """Keep the KV cells of the tree's root and of the nodes in `path`, and remove the tree's other cells.

        Returns:
            Whether all nodes of the tree were kept.
        """
        last = path[-1] if path else 0
        length = self._positions[last] + 1
        kept_all = length == self._positions[-1] + 1
        if last == len(path):
            # The accepted nodes come first in the tree, so their KV cells are already contiguous.
            self.truncate(length)
        else:
            self.context.compact_branch(self._sequences[last], self.length, length)
            self.length = length
            self.clear_round()
        return kept_all

    def end_round(self) -> None:
        """Remove the KV cells of the token tree that is being verified, if there is one."""
        if self._sequences:
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens and remove all branches of the draft tree.

        If the model can neither roll back nor restore checkpoints, this clears its whole cache instead.
        """
        # Keep the other llama.cpp sequences if `_replays` is set, because they contain checkpoints.
        if not self._replays:
            self.context.drop_others()
        self.length = length
        if not self.context.drop(0, length) and not self._replays:
            # Clear the entire cache, because the recurrent state still includes the removed tokens.
            self.context.clear()
            self.length = 0
        self.clear_round()

    def clear_round(self) -> None:
        """Discard the record of the current token tree, without changing the KV cache."""
        self._sequences, self._positions = [], []


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint of a recurrent model's state after the first `length` tokens.

    Attributes:
        length: Number of tokens.
        state: The llama.cpp sequence that holds the state, or a copy of it in main memory.
    """

    length: int
    state: int | memoryview


class Checkpoints:
    """Saves and restores checkpoints of a recurrent model's state, in the model's own thread.

    Each checkpoint is a llama.cpp sequence of its own, which is reused after the checkpoint has been
    garbage-collected. Saving one copies no data, because sequences can share KV cells and recurrent states.

    If the sequences of a model cannot share KV cells, checkpoints are copies in main memory of the part of
    the state that later tokens overwrite. llama.cpp would copy the whole KV cache of such a sequence, but not
    until the next forward pass, by which time the original may have changed.

    Args:
        context: The context of the model.
    """

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._free = list(range(1, context.plan.sequences))
        self._dropped: list[int] = []

    def save(self, length: int) -> Checkpoint:
        """Save the state of sequence 0, which must contain `length` tokens, and return the checkpoint."""
        if self._context.plan.checkpoint_bytes:
            return Checkpoint(length, self._context.export_sequence(recurrent_only=True))
        self.release_dropped()
        sequence = self._free.pop()
        checkpoint = Checkpoint(length, sequence)
        weakref.finalize(checkpoint, self._dropped.append, sequence)
        self._context.copy(0, sequence)
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Roll sequence 0 back to a checkpoint and discard all later tokens."""
        if isinstance(checkpoint.state, int):
            self.release_dropped()
            self._context.drop(0, 0)
            self._context.copy(checkpoint.state, 0)
            return
        if not self._context.import_sequence(checkpoint.state, recurrent_only=True):
            raise BackendError(
                f"the state after {checkpoint.length:,} tokens cannot be restored",
                "load the model again",
                code="state_not_restored",
            )
        # Remove the KV cells of later tokens, which importing the checkpoint leaves in place.
        self._context.drop(0, checkpoint.length)

    def release_dropped(self) -> None:
        """Free the llama.cpp sequences of checkpoints that have been garbage-collected."""
        while self._dropped:
            sequence = self._dropped.pop()
            self._context.drop(sequence, 0)
            self._free.append(sequence)
