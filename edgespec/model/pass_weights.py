"""The weights that a pass reads, by quantisation type. They determine the speed of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OutputLayer", "PassWeights"]

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The matrix that converts hidden states to logits.

    Attributes:
        type_name: Quantisation type, such as `Q6_K`.
        size_bytes: Size of the matrix.
        hidden_size: Number of values per hidden state.
        vocabulary_size: Number of logits per token.
    """

    type_name: str
    size_bytes: int
    hidden_size: int
    vocabulary_size: int

    @property
    def row_growth_bytes(self) -> int:
        """How many bytes larger a row of logits is than a hidden state."""
        return (self.vocabulary_size - self.hidden_size) * _FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class PassWeights:
    """The weights that a single-token pass reads.

    Attributes:
        bytes_of: Bytes of weights by type, such as `{"Q4_K": 3_000_000_000, "Q6_K": 1_000_000_000}`.
        layers: Number of layers.
        output: The output layer, which is included in `bytes_of`. None if the token embedding doubles as the
            output layer.
    """

    bytes_of: Mapping[str, int]
    layers: int
    output: OutputLayer | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all types."""
        return sum(self.bytes_of.values())
