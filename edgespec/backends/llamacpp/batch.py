"""What a pass is given: tokens, or the hidden states of rows, with their positions and sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import library

__all__ = ["Batch", "Inputs"]

# Tokens, or float32 [n, embd].
Inputs: TypeAlias = Sequence[int] | NDArray[np.float32]


class Batch:
    """A llama_batch, made once; numpy views let a pass fill it without a ctypes call per token.

    embd_size: numbers in a row of hidden states; 0 for a batch of tokens.
    """

    def __init__(self, size: int, sequences: int, embd_size: int = 0) -> None:
        self._lib = library()
        self.native: Any = self._lib.llama_batch_init(size, embd_size, sequences)
        batch = self.native
        self._inputs = (
            np.ctypeslib.as_array(batch.embd, (size * embd_size,)).reshape(size, embd_size)
            if embd_size
            else np.ctypeslib.as_array(batch.token, (size,))
        )
        self._position = np.ctypeslib.as_array(batch.pos, (size,))
        self._sequence_count = np.ctypeslib.as_array(batch.n_seq_id, (size,))
        self._wants_logits = np.ctypeslib.as_array(batch.logits, (size,))
        self._sequences = [batch.seq_id[i] for i in range(size)]

    def put(
        self, inputs: Inputs, positions: Sequence[int], sequences: Sequence[Sequence[int]], logits: bool
    ) -> None:
        """Fill it: rows that are each part of some sequences. logits: of every row, or of none."""
        count = self.native.n_tokens = len(inputs)
        self._inputs[:count] = inputs
        self._position[:count] = positions
        self._wants_logits[:count] = logits
        for i, ids in enumerate(sequences):
            self._sequence_count[i] = len(ids)
            for j, sequence in enumerate(ids):
                self._sequences[i][j] = sequence

    def append(self, inputs: Inputs, position: int) -> None:
        """Fill it with rows of sequence 0 from `position` on, without logits."""
        count = len(inputs)
        self.put(inputs, range(position, position + count), [(0,)] * count, logits=False)

    def free(self) -> None:
        """Give the memory back."""
        self._lib.llama_batch_free(self.native)
