"""Compute the logits with which a DSpark head corrects its drafts for the token before (arXiv 2607.05147)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

__all__ = ["MarkovHead"]


class MarkovHead:
    """The Markov head of a DSpark head: a table with a row of logits for each possible token before.

    The table is the product of two small matrices. llama.cpp applies it along its own guess of the block, so
    other drafts need it too.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self._vocab_size = vocab_size

    @cached_property
    def _outputs(self) -> NDArray[np.float32]:
        """The second matrix [draft vocabulary, rank]. Most greedy chains never need it."""
        tensor = self._tensors["markov_w2.weight"]
        outputs = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        scale = self._tensors.get("markov_w2.scale")
        return outputs if scale is None else outputs * np.float32(scale.data[0])

    def logits(self, token: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] that the head adds after a token."""
        tensor = self._tensors["markov_w1.weight"]
        logits: NDArray[np.float32] = self._outputs @ dequantize(
            tensor.data[token : token + 1], tensor.tensor_type
        )[0].astype(np.float32)
        ids = self._tensors.get("d2t")
        if ids is None:
            return logits
        result = np.zeros(self._vocab_size, np.float32)
        result[ids.data] = logits
        return result
