"""Checkpoints of a context's KV cache and recurrent state, stored as sequences that share its cells."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["StateCheckpoint", "StateCheckpoints"]


@dataclass(frozen=True, eq=False)
class StateCheckpoint:
    """A checkpoint of the first `length` tokens. Its cells can be freed once it is no longer referenced."""

    length: int
    sequence: int


class StateCheckpoints:
    """Saves and restores checkpoints of sequence 0, using one additional sequence per checkpoint.

    Saving a checkpoint copies no data: llama.cpp shares cells between sequences, and writes the next
    recurrent state to a new cell while the old one is in use. Only the model's thread may use this class.
    """

    def __init__(self, context: LlamaContext, sequences: range) -> None:
        self._context = context
        self._free = list(sequences)
        self._dropped: list[int] = []

    def save(self, length: int) -> StateCheckpoint:
        """Return a checkpoint of sequence 0, which must contain `length` tokens."""
        self.release_dropped()
        checkpoint = StateCheckpoint(length, self._free.pop())
        weakref.finalize(checkpoint, self._dropped.append, checkpoint.sequence)
        self._context.copy(0, checkpoint.sequence)
        return checkpoint

    def restore(self, checkpoint: StateCheckpoint) -> None:
        """Roll sequence 0 back to a checkpoint and discard all later tokens."""
        self.release_dropped()
        self._context.drop(0, 0)
        self._context.copy(checkpoint.sequence, 0)

    def release_dropped(self) -> None:
        """Free the cells of checkpoints that are no longer referenced."""
        while self._dropped:
            sequence = self._dropped.pop()
            self._context.drop(sequence, 0)
            self._free.append(sequence)
