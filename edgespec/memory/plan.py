"""The memory plan: everything that will be in memory, item by item, compared with the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgespec.backends.memory_estimate import MemoryEstimate, ModelMemoryKind, Pool
from edgespec.memory.budget import Budget

__all__ = ["Decision", "Item", "ItemKind", "MemoryPlan", "compute_headroom_bytes", "create_items"]

ItemKind = ModelMemoryKind | Literal["process", "headroom"]

# The default headroom: what a plan adds for everything it does not model, such as llama.cpp's bookkeeping
# and memory fragmentation. Chosen.
_HEADROOM_SHARE, _MIN_HEADROOM_BYTES = 0.05, 64 * 2**20

_NAMES: dict[ModelMemoryKind, str] = {
    "weights": "weights",
    "cache": "cache",
    "compute": "compute buffers",
    "output": "logits",
    "vocabulary": "vocabulary",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a memory plan.

    Attributes:
        role: what the memory belongs to, such as `target` or `draft`.
        name: the item's name for people.
        kind: what the memory holds; see `ModelMemoryKind`.
        bytes: its size.
        pool: where it is allocated.
    """

    role: str
    name: str
    kind: ItemKind
    bytes: int
    pool: Pool = "memory"


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that the planner gave up so that the rest fits.

    Attributes:
        what: what was given up, for people.
        why: why this is the smallest loss, for people.
        bytes: the memory that this saves.
    """

    what: str
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a target, of its drafters and of this process, compared with a budget.

    Attributes:
        budget: the memory that may be used.
        context_tokens: size of the target's context.
        kv_type: number format of the target's KV cache, for people.
        items: all planned memory. The prefix cache is not among them, because it is dropped on demand.
        decisions: what the planner gave up so that the items fit.
        prefix_cache_bytes: size limit of the prefix cache, taken from what the items leave free.
    """

    budget: Budget
    context_tokens: int
    kv_type: str
    items: tuple[Item, ...]
    decisions: tuple[Decision, ...] = ()
    prefix_cache_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the items fit every pool."""
        return all(self.free_bytes(pool) >= 0 for pool in self.pools)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The memory pools of this machine: system memory, and separate memory of graphics cards."""
        return ("memory", "gpu") if self.budget.gpu_bytes else ("memory",)

    def budget_bytes(self, pool: Pool) -> int:
        """Return the bytes of a pool that may be used."""
        return self.budget.gpu_bytes if pool == "gpu" else self.budget.bytes

    def planned_bytes(self, pool: Pool) -> int:
        """Return the bytes of a pool that the items take."""
        return sum(item.bytes for item in self.items if item.pool == pool)

    def free_bytes(self, pool: Pool) -> int:
        """Return the bytes of a pool that the items leave free; negative if they do not fit."""
        return self.budget_bytes(pool) - self.planned_bytes(pool)

    @property
    def total_bytes(self) -> int:
        """The bytes of all items in all pools."""
        return sum(item.bytes for item in self.items)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `edgespec plan --json` prints."""
        has_gpu = len(self.pools) > 1
        return {
            "budget_bytes": self.budget.bytes,
            **({"gpu_budget_bytes": self.budget.gpu_bytes} if has_gpu else {}),
            "budget_from": self.budget.source,
            "fits": self.fits,
            "total_bytes": self.total_bytes,
            "prefix_cache_bytes": self.prefix_cache_bytes,
            "context": self.context_tokens,
            "kv_type": self.kv_type,
            "items": [
                {"name": item.name, "kind": item.kind, "bytes": item.bytes}
                | ({"pool": item.pool} if has_gpu else {})
                for item in self.items
            ],
            "decisions": [
                {"what": each.what, "why": each.why, "bytes": each.bytes} for each in self.decisions
            ],
        }


def create_items(role: str, estimate: MemoryEstimate) -> tuple[Item, ...]:
    """Return the plan's items for one model."""
    return tuple(
        Item(role, f"{role} {_NAMES[part.kind]}", part.kind, part.bytes, part.pool)
        for part in estimate.parts
        if part.bytes
    )


def compute_headroom_bytes(planned_bytes: int, headroom_bytes: int | None = None) -> int:
    """Return the headroom for `planned_bytes`: `headroom_bytes`, or by default 5 % and at least 64 MiB."""
    if headroom_bytes is not None:
        return headroom_bytes
    return max(_MIN_HEADROOM_BYTES, int(planned_bytes * _HEADROOM_SHARE))
