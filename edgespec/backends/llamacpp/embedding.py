"""Embed text with a GGUF model by pooling its last layer's hidden states into one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.backends.llamacpp.native import library
from edgespec.errors import CapabilityError
from edgespec.model.base import Progress
from edgespec.model.base_model import in_batches

__all__ = ["Pooling"]

# Values of `pooling_type` in the metadata. Text-generation models have no `pooling_type`.
_NONE, _MEAN, _CLS, _LAST = "0", "1", "2", "3"


class Pooling(NamedTuple):
    """A model's pooling method, which reduces the hidden states of a text to one vector.

    edgespec does the pooling itself, because llama.cpp can pool only texts that fit in one pass.

    Attributes:
        kind: The value of `pooling_type` in the metadata. If it is missing, mean pooling is used.
        eos: The token that the model expects at the end of a text, or None.
    """

    kind: str
    eos: int | None

    @classmethod
    def of(cls, weights: Any) -> Pooling:
        """Read a model's pooling method from its metadata."""
        lib = library()
        vocab = lib.llama_model_get_vocab(weights)
        eos = lib.llama_vocab_eos(vocab) if lib.llama_vocab_get_add_eos(vocab) else None
        return cls(architecture_metadata(weights, "pooling_type") or _NONE, eos)

    def whole_text(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens, followed by the EOS token if the model expects one."""
        return tokens if self.eos in (None, tokens[-1]) else [*tokens, self.eos]

    def embed(
        self,
        tokens: Sequence[int],
        run: Callable[[Sequence[int], int], NDArray[np.float32]],
        batch_tokens: int,
        progress: Progress | None,
    ) -> NDArray[np.float32]:
        """Return the embedding of a text as float32 [size].

        Args:
            tokens: The text's tokens, as returned by `whole_text`.
            run: Appends tokens at a position and returns the last layer's hidden states.
            batch_tokens: Maximum number of tokens per call to `run`.
            progress: Called after each batch. Returning False cancels the computation.

        Raises:
            CapabilityError: The model's vectors serve another purpose, such as ranking.
            CancelledError: `progress` returned False.
        """
        if self.kind not in (_NONE, _MEAN, _CLS, _LAST):
            raise CapabilityError(
                f"the model was trained to rank texts, not to compute embeddings (pooling_type {self.kind})",
                "choose an embedding model",
                code="embeddings_not_supported",
            )
        position, first, last, total = 0, None, None, 0.0
        for batch in in_batches(tokens, batch_tokens, progress):
            states = run(batch, position)
            first, last = states[0] if first is None else first, states[-1]
            total = total + states.sum(axis=0, dtype=np.float64)
            position += len(batch)
        pooled = {_CLS: first, _LAST: last}.get(self.kind, total / position)
        return np.asarray(pooled, np.float32)
