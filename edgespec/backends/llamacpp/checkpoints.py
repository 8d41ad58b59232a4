"""Save and restore a context's KV cache and recurrent state, using one llama.cpp sequence per checkpoint."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["StateCheckpoint", "StateCheckpoints"]


@dataclass(frozen=True, eq=False)
class StateCheckpoint:
    """A checkpoint of a model's state after the first `length` tokens.

    Its llama.cpp sequence is reused after the checkpoint has been garbage-collected.
    """

    length: int
    sequence: int


class StateCheckpoints:
    """Saves and restores checkpoints of a model's state, each in its own llama.cpp sequence.

    Saving a checkpoint copies no data, because llama.cpp sequences can share KV cells and recurrent states.
    Only the model's thread may use this class.
    """

    def __init__(self, context: LlamaContext, sequences: range) -> None:
        self._context = context
        self._free = list(sequences)
        self._dropped: list[int] = []

    def save(self, length: int) -> StateCheckpoint:
        """Save the state of sequence 0, which must contain `length` tokens, and return the checkpoint."""
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
        """Free the llama.cpp sequences of checkpoints that have been garbage-collected."""
        while self._dropped:
            sequence = self._dropped.pop()
            self._context.drop(sequence, 0)
            self._free.append(sequence)
