"""Earlier checkpoints of a context, held as sequences that share its cells."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from edgespec.backends.llamacpp.context import LlamaContext

__all__ = ["StateCheckpoint", "StateCheckpoints"]


@dataclass(frozen=True, eq=False)
class StateCheckpoint:
    """The memory of `length` tokens, in a sequence of its own; gone when nobody refers to it."""

    length: int
    sequence: int


class StateCheckpoints:
    """Holds as many checkpoints of sequence 0 as there are spare sequences.

    Nothing is copied here: keys and values are shared, and the library writes the next state elsewhere
    while the present one is.
    """

    def __init__(self, context: LlamaContext, sequences: range) -> None:
        self._context = context
        self._free = list(sequences)
        self._forgotten: list[int] = []

    def save(self, length: int) -> StateCheckpoint:
        """Hold sequence 0, which has `length` tokens."""
        self.release_dropped()
        moment = StateCheckpoint(length, self._free.pop())
        weakref.finalize(moment, self._forgotten.append, moment.sequence)
        self._context.copy(0, moment.sequence)
        return moment

    def restore(self, moment: StateCheckpoint) -> None:
        """Make sequence 0 what it was; what came after is dropped, finished or not."""
        self.release_dropped()
        self._context.drop(0, 0)
        self._context.copy(moment.sequence, 0)

    def release_dropped(self) -> None:
        """Take the cells of forgotten checkpoints back."""
        while self._forgotten:
            sequence = self._forgotten.pop()
            self._context.drop(sequence, 0)
            self._free.append(sequence)
