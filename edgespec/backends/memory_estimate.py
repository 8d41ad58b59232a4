"""Estimates of a model's memory use, computed from its metadata before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from edgespec.backends.base import LoadOptions

__all__ = [
    "GPU",
    "MEMORY",
    "MODEL_MEMORY_KINDS",
    "MemoryEstimate",
    "MemoryEstimator",
    "MemoryPart",
    "ModelMemoryKind",
    "Pool",
]

ModelMemoryKind = Literal["weights", "cache", "compute", "output", "vocabulary"]
MODEL_MEMORY_KINDS: tuple[ModelMemoryKind, ...] = get_args(ModelMemoryKind)
"""The purposes for which a model uses memory.

- weights: the model's tensors.
- cache: KV caches and recurrent states, for a full context.
- compute: buffers for intermediate results of the widest pass.
- output: logits of the widest verify pass.
- vocabulary: the text of each token, and the tokenizer's lookup tables.
"""

Pool = Literal["memory", "gpu"]
"""Where memory is allocated: in system memory, or in the separate memory of graphics cards."""

MEMORY: Pool = "memory"
GPU: Pool = "gpu"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The memory that a model uses for one purpose (`kind`) in system or GPU memory (`pool`)."""

    kind: ModelMemoryKind
    bytes: int
    pool: Pool = MEMORY


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated memory use of a model with a full context. `kv_type` is the data type of its KV cache."""

    context_tokens: int
    kv_type: str
    parts: tuple[MemoryPart, ...]

    def bytes_of(self, *kinds: ModelMemoryKind) -> int:
        """Return the estimated memory in bytes that the model uses for the given purposes."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    @property
    def total_bytes(self) -> int:
        """The estimated memory of the model in bytes."""
        return sum(part.bytes for part in self.parts)


class MemoryEstimator(Protocol):
    """Estimates a model's memory use from its metadata, without reading its weights.

    Attributes:
        trained_context_tokens: Context length that the model was trained for. 0 if the files do not state it.
        layers: Number of layers that can be offloaded to graphics cards individually. 0 if this is not
            supported.
        longrope_switch_tokens: Context size in tokens above which the model uses different LongRoPE factors.
            0 if it always uses the same ones.
        why_not_shared: The reason why several replies cannot share the model's forward passes. Empty if they
            can.
    """

    name: str
    trained_context_tokens: int
    layers: int
    longrope_switch_tokens: int
    why_not_shared: str

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """Estimate the memory that the model will use with `options`, within `options.memory_bytes`.

        Raises:
            OptionError: The model cannot be loaded with these options.
            MemoryBudgetError: There is not enough memory to compute the estimate.
        """

    def close(self) -> None:
        """Free the model's metadata, which the estimator holds in memory."""
