"""The plan: everything that will be in memory, by name, against the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgespec.backends.memory_estimate import MemoryEstimate, PartKind, Pool
from edgespec.memory.budget import Budget

__all__ = ["Decision", "Item", "ItemKind", "MemoryPlan", "items_of"]

ItemKind = Literal[
    "weights",
    "cache",
    "cells",
    "compute",
    "graphs",
    "output",
    "vocabulary",
    "heap",
    "process",
    "headroom",
    "kept",
]

_NAMES: dict[PartKind, str] = {
    "weights": "weights",
    "cache": "cache",
    "cells": "notes on the cache",
    "compute": "buffers to compute in",
    "graphs": "notes on passes",
    "output": "logits",
    "vocabulary": "vocabulary",
    "heap": "rest of the heap",
}


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory. role: what it belongs to, such as `target` or `draft`."""

    role: str
    name: str
    kind: ItemKind
    bytes: int
    pool: Pool = "memory"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was given up so that the rest fits. bytes: what that frees."""

    what: str
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a target and what drafts for it take. context_tokens: of the target's context.

    kv_type: of its cache, in words.
    """

    budget: Budget
    context_tokens: int
    kv_type: str
    items: tuple[Item, ...]
    decisions: tuple[Decision, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every memory holds what is to lie in it."""
        return all(self.free_bytes(pool) >= 0 for pool in self.pools)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Which memories there are: one, or two where graphics cards have their own."""
        return ("memory", "gpu") if self.budget.gpu_bytes else ("memory",)

    def budget_bytes(self, pool: Pool) -> int:
        """What may be taken of a memory."""
        return self.budget.gpu_bytes if pool == "gpu" else self.budget.bytes

    def planned_bytes(self, pool: Pool) -> int:
        """What the items take of a memory."""
        return sum(item.bytes for item in self.items if item.pool == pool)

    def free_bytes(self, pool: Pool) -> int:
        """What is left of a memory; below 0 where it is too small."""
        return self.budget_bytes(pool) - self.planned_bytes(pool)

    @property
    def prefix_cache_bytes(self) -> int:
        """What texts that are kept may take at most; what they do not take stays free."""
        return sum(item.bytes for item in self.items if item.kind == "kept")

    @property
    def total_bytes(self) -> int:
        """All items."""
        return sum(item.bytes for item in self.items)

    def to_json(self) -> dict[str, Any]:
        """What `edgespec plan --json` prints."""
        two = len(self.pools) > 1
        return {
            "budget_bytes": self.budget.bytes,
            **({"gpu_budget_bytes": self.budget.gpu_bytes} if two else {}),
            "budget_from": self.budget.source,
            "fits": self.fits,
            "total_bytes": self.total_bytes,
            "context": self.context_tokens,
            "kv_type": self.kv_type,
            "items": [
                {"name": item.name, "kind": item.kind, "bytes": item.bytes}
                | ({"pool": item.pool} if two else {})
                for item in self.items
            ],
            "decisions": [
                {"what": each.what, "why": each.why, "bytes": each.bytes} for each in self.decisions
            ],
        }


def items_of(role: str, footprint: MemoryEstimate) -> tuple[Item, ...]:
    """The items of one model."""
    return tuple(
        Item(role, f"{role} {_NAMES[part.kind]}", part.kind, part.bytes, part.pool)
        for part in footprint.parts
        if part.bytes
    )
