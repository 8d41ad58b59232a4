"""Input batches for llama.cpp: tokens or hidden states, with their positions and sequence ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import library

__all__ = ["Batch", "Inputs"]

# The input of a forward pass: token ids, or hidden states as a float32 array [tokens, embedding size].
Inputs: TypeAlias = Sequence[int] | NDArray[np.float32]


class Batch:
    """A reusable llama_batch that is allocated once and filled through NumPy views.

    Writing through the views avoids a ctypes call per token. The owner must call `free`.
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
        self._needs_logits = np.ctypeslib.as_array(batch.logits, (size,))
        self._sequences = [batch.seq_id[i] for i in range(size)]

    def put(
        self,
        inputs: Inputs,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        logits: bool | Sequence[bool],
    ) -> None:
        """Replace the batch's contents. `logits` is one flag for all inputs, or one flag per input."""
        count = self.native.n_tokens = len(inputs)
        self._inputs[:count] = inputs
        self._position[:count] = positions
        self._needs_logits[:count] = logits
        for i, ids in enumerate(sequences):
            self._sequence_count[i] = len(ids)
            for j, sequence in enumerate(ids):
                self._sequences[i][j] = sequence

    def free(self) -> None:
        """Free the native llama_batch."""
        self._lib.llama_batch_free(self.native)
