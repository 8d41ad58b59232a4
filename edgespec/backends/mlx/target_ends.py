"""The parts of a target that heads share: its token embedding, LM head, vocabulary and sizes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from numpy.typing import NDArray

from edgespec.backends.mlx.layers import Body
from edgespec.errors import CapabilityError
from edgespec.model.base_model import BaseModel
from edgespec.model.hidden_states import HiddenStateSource

__all__ = ["DraftVocabulary", "HeadTarget", "TargetEmbedding", "TargetLmHead"]


class HeadTarget(BaseModel, HiddenStateSource):
    """An MLX model that heads can draft for.

    Attributes:
        memory_bytes: Memory limit in bytes for the model, its KV cache and its head, or None if there is no
            limit.
    """

    memory_bytes: int | None

    @property
    @abstractmethod
    def net(self) -> Any:
        """The mlx-lm model."""

    @property
    @abstractmethod
    def layer_count(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Number of values per hidden state."""


class TargetEmbedding:
    """The token embedding of a target.

    Raises:
        CapabilityError: The target has no embedding of the expected vocabulary and hidden size.
    """

    def __init__(self, net: Any, vocab_size: int, size: int) -> None:
        modules = (module for _, module in net.named_modules())
        found = [one for one in modules if _embedding_shape(one) == (vocab_size, size)]
        if not found:
            raise CapabilityError(
                f"the draft head was made for another model: it needs an embedding with {vocab_size:,} tokens"
                f" of size {size:,}",
                "choose the head that was published for this model",
                code="head_mismatch",
            )
        self._embedding = found[0]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [tokens, size] of token ids [tokens]."""
        embeddings: mx.array = self._embedding(tokens)
        return embeddings


def _embedding_shape(module: Any) -> tuple[int, ...] | None:
    """Return an embedding's vocabulary size and hidden size, or None for other modules."""
    if isinstance(module, QuantizedEmbedding):
        return module.num_embeddings, module.dims
    return module.weight.shape if isinstance(module, Embedding) else None


class TargetLmHead:
    """The LM head of a target, including any logit scaling or softcapping.

    Raises:
        CapabilityError: The LM head is not separate from the target's layers.
    """

    def __init__(self, net: Any) -> None:
        self._net = net
        self._body = Body(net)

    def __call__(self, states: mx.array) -> mx.array:
        """Return the logits [tokens, vocab] for hidden states [tokens, size] after the final norm."""
        with self._body.returning(states[None]):
            logits: mx.array = self._net(mx.zeros((1, states.shape[0]), mx.int32))[0]
        return logits


class DraftVocabulary:
    """A head's draft vocabulary, which contains some or all of the target's tokens.

    Args:
        target_ids: Target token id for each draft token, int64 [draft vocabulary]. None if both vocabularies
            are equal.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, target_ids: NDArray[np.int64] | None, vocab_size: int) -> None:
        self._columns: mx.array | None = None
        if target_ids is not None:
            # Each target token's column in the head's logits. Tokens that the head cannot draft share an
            # extra column of -inf.
            columns = np.full(vocab_size, len(target_ids))
            columns[target_ids] = np.arange(len(target_ids))
            self._columns = mx.array(columns)
            mx.eval(self._columns)

    def spread(self, rows: mx.array) -> mx.array:
        """Map the head's logits to the target's vocabulary. Tokens outside the draft vocabulary get -inf."""
        if self._columns is None:
            return rows
        rows = mx.concatenate([rows, mx.full((rows.shape[0], 1), -mx.inf)], axis=1)
        return mx.take(rows, self._columns, axis=1)
