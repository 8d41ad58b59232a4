"""The weights that one pass of a model reads, by quantisation type. They determine its speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PassWeights"]


@dataclass(frozen=True, slots=True)
class PassWeights:
    """The weights that a single-token pass reads.

    Attributes:
        bytes_of: Bytes of weights by type, such as `{"Q4_K": 3_000_000_000, "Q6_K": 1_000_000_000}`.
        layers: Number of layers.
    """

    bytes_of: Mapping[str, int]
    layers: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all types."""
        return sum(self.bytes_of.values())
