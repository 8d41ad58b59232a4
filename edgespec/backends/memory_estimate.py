"""Estimate how much memory a model takes before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from edgespec.backends.base import LoadOptions

__all__ = ["GPU", "MEMORY", "MemoryEstimate", "MemoryEstimator", "MemoryPart", "ModelMemoryKind", "Pool"]

ModelMemoryKind = Literal["weights", "cache", "compute", "output", "vocabulary"]
"""The content of a part of a model's memory.

- weights: the model's tensors.
- cache: KV caches and recurrent states, for a full context.
- compute: buffers for intermediate results of the widest pass, and the library's data about graph and cache.
- output: logits of the widest verify pass.
- vocabulary: the tokens' texts and the lookup tables over them.
"""

Pool = Literal["memory", "gpu"]
"""Where memory is allocated: in system memory, or in the separate memory of graphics cards."""

MEMORY: Pool = "memory"
GPU: Pool = "gpu"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one kind that a model takes in one pool."""

    kind: ModelMemoryKind
    bytes: int
    pool: Pool = MEMORY


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of one loaded model whose context is full.

    Attributes:
        kv_type: Data type of the KV cache, for messages.
        parts: All memory of the model. Kinds and pools may repeat.
    """

    context_tokens: int
    kv_type: str
    parts: tuple[MemoryPart, ...]

    def bytes_of(self, *kinds: ModelMemoryKind) -> int:
        """Return the bytes of these kinds, summed over all pools."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    @property
    def total_bytes(self) -> int:
        """The bytes of all kinds, summed over all pools."""
        return sum(part.bytes for part in self.parts)


class MemoryEstimator(Protocol):
    """Estimates the memory of a model from its metadata, without reading its weights.

    Attributes:
        name: Name of the model for messages.
        trained_context_tokens: Context that the model was trained for. 0 if unknown.
        layers: Number of layers that can be offloaded to graphics cards one by one. 0 if none can.
        longrope_switch_tokens: See `initial_context` in memory_check.py.
    """

    name: str
    trained_context_tokens: int
    layers: int
    longrope_switch_tokens: int

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """Estimate the memory of the model loaded with `options`, within `options.memory_bytes`.

        Raises:
            OptionError: The model cannot be loaded with these options.
            MemoryBudgetError: There is not even enough memory to simulate the context.
        """

    def close(self) -> None:
        """Free the metadata."""
