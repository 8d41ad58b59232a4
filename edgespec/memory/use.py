"""The memory that a loaded runtime currently uses."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.memory.plan import MemoryPlan
from edgespec.memory.prefix_cache import PrefixCacheUsage

__all__ = ["MemoryUse"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory currently used by a runtime.

    Attributes:
        weight_bytes: Size of the target's and draft model's weights.
        kv_bytes: Current size of the target's and draft model's KV caches.
        resident_bytes: Resident memory of the process, including memory-mapped weights read so far.
        plan: The memory plan made before loading.
        context_tokens: Current context size of the target.
        max_context_tokens: Maximum context size.
        available_bytes: Memory still available to other programs.
        reclaimed_bytes: Total memory freed for other programs so far.
        last_reclaim: What was freed last, and why.
    """

    weight_bytes: int
    kv_bytes: int
    resident_bytes: int
    prefix_cache: PrefixCacheUsage
    plan: MemoryPlan | None = None
    context_tokens: int = 0
    max_context_tokens: int = 0
    available_bytes: int = 0
    reclaimed_bytes: int = 0
    last_reclaim: str = ""
