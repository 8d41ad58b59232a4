"""The input of a pass: tokens or hidden states, with their positions and sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import library

__all__ = ["Batch", "Inputs"]

# Token ids, or hidden states as float32 [n, embd].
Inputs: TypeAlias = Sequence[int] | NDArray[np.float32]


class Batch:
    """A llama_batch that is allocated once and filled through numpy views.

    The views save a ctypes call per token. The owner must call `free`.

    Args:
        size: The maximum number of rows.
        sequences: The maximum number of sequences per row.
        embd_size: The length of a hidden state, or 0 for a batch of tokens.
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
        self, inputs: Inputs, positions: Sequence[int], sequences: Sequence[Sequence[int]], logits: bool
    ) -> None:
        """Replace the content.

        Args:
            inputs: The rows.
            positions: The position of each row.
            sequences: The sequences that each row belongs to.
            logits: Compute the logits of all rows, or of none.
        """
        count = self.native.n_tokens = len(inputs)
        self._inputs[:count] = inputs
        self._position[:count] = positions
        self._needs_logits[:count] = logits
        for i, ids in enumerate(sequences):
            self._sequence_count[i] = len(ids)
            for j, sequence in enumerate(ids):
                self._sequences[i][j] = sequence

    def put_consecutive(self, inputs: Inputs, position: int) -> None:
        """Replace the content by rows of sequence 0 from `position` on, without logits."""
        count = len(inputs)
        self.put(inputs, range(position, position + count), [(0,)] * count, logits=False)

    def free(self) -> None:
        """Free the native memory."""
        self._lib.llama_batch_free(self.native)
