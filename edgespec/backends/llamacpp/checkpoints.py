"""Save and restore a context's KV cache and recurrent state."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.errors import BackendError

__all__ = ["Checkpoint", "ExportedCheckpoint", "StateCheckpoints", "open_checkpoints"]


class Checkpoint(Protocol):
    """A checkpoint of a model's state after the first `length` tokens."""

    @property
    def length(self) -> int: ...


class Checkpoints(Protocol):
    """Saves and restores checkpoints of a model's state. Only the model's thread may use this class."""

    def save(self, length: int) -> Checkpoint:
        """Save the state of sequence 0, which must contain `length` tokens, and return the checkpoint."""

    def restore(self, checkpoint: Any) -> None:
        """Roll sequence 0 back to a checkpoint and discard all later tokens."""

    def release_dropped(self) -> None:
        """Free the memory of checkpoints that have been garbage-collected."""


def open_checkpoints(context: LlamaContext) -> Checkpoints:
    """Create the checkpoint store for a context with recurrent layers."""
    if context.plan.checkpoint_bytes:
        return ExportedCheckpoints(context)
    return StateCheckpoints(context, range(1, context.plan.sequences))


@dataclass(frozen=True, eq=False)
class StateCheckpoint:
    """A checkpoint of a model's state after the first `length` tokens.

    Its llama.cpp sequence is reused after the checkpoint has been garbage-collected.
    """

    length: int
    sequence: int


class StateCheckpoints:
    """Stores each checkpoint of a model's state in its own llama.cpp sequence.

    Saving a checkpoint copies no data, because llama.cpp sequences can share KV cells and recurrent states.
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


@dataclass(frozen=True, eq=False)
class ExportedCheckpoint:
    """A copy of the part of a model's state that later tokens overwrite, taken after `length` tokens."""

    length: int
    state: memoryview


class ExportedCheckpoints:
    """Stores checkpoints of a model's state in main memory.

    Used for models whose sequences cannot share KV cells. llama.cpp would copy the whole KV cache of such a
    sequence, but not until the next forward pass, by which time the original may have changed.
    """

    def __init__(self, context: LlamaContext) -> None:
        self._context = context

    def save(self, length: int) -> ExportedCheckpoint:
        return ExportedCheckpoint(length, self._context.export_sequence(recurrent_only=True))

    def restore(self, checkpoint: ExportedCheckpoint) -> None:
        if not self._context.import_sequence(checkpoint.state, recurrent_only=True):
            raise BackendError(
                f"the state after {checkpoint.length:,} tokens cannot be restored",
                "load the model again",
                code="state_not_restored",
            )
        # Remove the KV cells of later tokens, which importing the checkpoint leaves in place.
        self._context.drop(0, checkpoint.length)

    def release_dropped(self) -> None:
        """Do nothing. Unused checkpoints are garbage-collected."""
