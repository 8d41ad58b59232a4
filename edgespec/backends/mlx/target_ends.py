"""Use the embedding and the LM head of a target, which heads borrow."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from edgespec.backends.mlx.layers import Body
from edgespec.errors import CapabilityError

__all__ = ["TargetEmbedding", "TargetLmHead"]


class TargetEmbedding:
    """The token embedding of a target.

    Raises:
        CapabilityError: The target has no embedding with this many tokens and elements per token.
    """

    def __init__(self, net: Any, vocab_size: int, size: int) -> None:
        modules = (module for _, module in net.named_modules())
        found = [one for one in modules if _embedding_shape(one) == (vocab_size, size)]
        if not found:
            raise CapabilityError(
                f"the head needs an embedding with {vocab_size:,} tokens of size {size:,}, which its target"
                " does not have",
                "choose the head that was published for this target",
            )
        self._embedding = found[0]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [tokens, size] of tokens [tokens]."""
        embeddings: mx.array = self._embedding(tokens)
        return embeddings


def _embedding_shape(module: Any) -> tuple[int, ...] | None:
    """Return the number of tokens and elements per token of an embedding, or None for other modules."""
    if isinstance(module, QuantizedEmbedding):
        return module.num_embeddings, module.dims
    return module.weight.shape if isinstance(module, Embedding) else None


class TargetLmHead:
    """The LM head of a target, with everything that the target applies to its logits.

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
