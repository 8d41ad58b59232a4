"""Compute the logits that DSpark heads add depending on the previous draft token (arXiv 2607.05147)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgespec.backends.gguf_header import read_header
from edgespec.backends.llamacpp.file_matrix import FileMatrix

__all__ = ["MarkovHead"]


class MarkovHead:
    """The Markov head of a DSpark head, a table with a row of logits for each possible previous token.

    The table is the product of two low-rank matrices, `markov_w1` and `markov_w2`. llama.cpp adds the rows
    only for the most likely draft. This class computes the rows for all other drafts.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._names = {tensor.name for tensor in read_header(path).tensors}
        self._inputs = FileMatrix(path, "markov_w1.weight")

    @cached_property
    def _outputs(self) -> NDArray[np.float32]:
        """The matrix `markov_w2` [draft vocabulary, rank].

        The matrix is loaded on first use, because most greedy drafts match the draft that llama.cpp predicts
        itself, and never need the matrix.
        """
        matrix = FileMatrix(self._path, "markov_w2.weight")
        outputs: NDArray[np.float32] = dequantize(matrix.stored(), matrix.kind).astype(np.float32)
        if "markov_w2.scale" in self._names:
            outputs *= FileMatrix(self._path, "markov_w2.scale").rows([0])
        return outputs

    @cached_property
    def _target_ids(self) -> NDArray[np.int64] | None:
        """Maps draft tokens to the target's tokens. None if the head uses the target's vocabulary."""
        return FileMatrix(self._path, "d2t").stored().view(np.int64)[0] if "d2t" in self._names else None

    def logits(self, token: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] that the Markov head adds if `token` is the previous token."""
        logits: NDArray[np.float32] = self._outputs @ self._inputs.rows([token])[0]
        if self._target_ids is None:
            return logits
        result = np.zeros(self._vocab_size, np.float32)
        result[self._target_ids] = logits
        return result
