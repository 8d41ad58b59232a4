"""What a model will take in memory, told from its metadata before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from edgespec.backends.base import LoadOptions

__all__ = ["DEVICE", "MEMORY", "MemoryEstimate", "MemoryEstimator", "Part", "PartKind", "Pool"]

PartKind = Literal["weights", "cache", "cells", "compute", "graphs", "output", "vocabulary", "heap"]
"""Weights; keys, values and states; what a pass computes in; the logits it leaves; tokens as text.

cells: what is noted of each place in the cache, such as whose it is. graphs: what is noted of each step of a
pass. heap: what malloc keeps beside all that.
"""

Pool = Literal["memory", "gpu"]
"""Which memory: the system's, or that of graphics cards that have their own."""

MEMORY: Pool = "memory"
DEVICE: Pool = "gpu"


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a model takes."""

    kind: PartKind
    bytes: int
    pool: Pool = MEMORY


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a model takes when it is loaded with some options, and its context is full.

    context_tokens, kv_type: of the context that will be made; kv_type in words.
    """

    context_tokens: int
    kv_type: str
    parts: tuple[Part, ...]

    def of(self, *kinds: PartKind) -> int:
        """Bytes of these kinds, in whatever memory."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.parts)


class MemoryEstimator(Protocol):
    """A model's metadata, opened to be asked what it would take. Nothing of its weights is read.

    layers: 0 where they cannot be put on a graphics card one by one.
    longrope_switch_tokens: see `initial_context`.
    """

    name: str
    trained_context_tokens: int
    layers: int
    longrope_switch_tokens: int

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """What the model takes when loaded like this; `memory_bytes` is taken for what is there for it.

        Raises OptionError for options the model cannot be loaded with, and MemoryBudgetError where even the
        metadata of a context does not fit.
        """

    def close(self) -> None:
        """Let go of the metadata."""
