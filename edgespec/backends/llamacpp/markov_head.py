"""Compute the logits that DSpark heads add depending on the previous draft token (arXiv 2607.05147)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgespec.backends.gguf_header import read_header

__all__ = ["MarkovHead"]


class MarkovHead:
    """The Markov head of a DSpark head, a table with a row of logits for each possible previous token.

    The table is the product of two low-rank matrices, `markov_w1` and `markov_w2`. llama.cpp adds the rows
    for the draft that it predicts itself. This class computes the rows for all other drafts.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._header = read_header(path)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}

    def _rows(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Return rows [begin, end) of a matrix in the file, as float32."""
        tensor = self._tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[0] // block_elements * block_bytes
        start = self._header.size_bytes + tensor.offset_bytes
        rows = np.memmap(self._path, np.uint8, "r", start, (tensor.elements // tensor.shape[0], row_bytes))
        return dequantize(np.array(rows[begin:end]), kind).astype(np.float32)

    @cached_property
    def _outputs(self) -> NDArray[np.float32]:
        """The matrix `markov_w2` [draft vocabulary, rank].

        Loaded on first use, because greedy drafts usually match the draft that llama.cpp predicts itself, so
        most of them never need it.
        """
        outputs = self._rows("markov_w2.weight")
        return outputs * self._rows("markov_w2.scale") if "markov_w2.scale" in self._tensors else outputs

    @cached_property
    def _target_ids(self) -> NDArray[np.int64] | None:
        """Maps draft tokens to the target's tokens. None if the head uses the target's vocabulary."""
        tensor = self._tensors.get("d2t")
        if tensor is None:
            return None
        start = self._header.size_bytes + tensor.offset_bytes
        return np.fromfile(self._path, np.int64, tensor.elements, offset=start)

    def logits(self, token: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] that the Markov head adds if `token` is the previous token."""
        logits: NDArray[np.float32] = self._outputs @ self._rows("markov_w1.weight", token, token + 1)[0]
        if self._target_ids is None:
            return logits
        result = np.zeros(self._vocab_size, np.float32)
        result[self._target_ids] = logits
        return result
