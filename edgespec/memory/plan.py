"""The memory plan, which lists the memory needed to load the models and compares it with the budget.

`MemoryUse` describes the memory that a loaded runtime currently uses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgespec.memory.budget import Budget
from edgespec.memory.constants import HEADROOM_SHARE, MIN_HEADROOM_BYTES, SLOW_DISK_BYTES_PER_SECOND
from edgespec.memory.prefix_cache.cache import PrefixCacheUsage
from edgespec.model.memory_estimate import ExpertShares, MachineShare, MemoryEstimate, ModelMemoryKind, Pool
from edgespec.system.files import format_bytes, format_rate

__all__ = ["Decision", "Item", "MemoryPlan", "MemoryUse", "Streaming", "create_items", "shared_items"]

ItemKind = ModelMemoryKind | Literal["process", "headroom"]


_NAMES: dict[ModelMemoryKind, str] = {
    "weights": "weights",
    "cache": "cache",
    "compute": "compute buffers",
    "unusable": "uneven division between GPUs",
    "output": "logits",
    "vocabulary": "vocabulary",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a memory plan: memory of one kind used by a `role`, such as `target` or `draft`."""

    role: str
    name: str
    kind: ItemKind
    bytes: int
    pool: Pool = "memory"


@dataclass(frozen=True, slots=True)
class Decision:
    """A load option that was reduced to save memory, with the user-facing reason and the bytes saved."""

    what: str
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Streaming:
    """The weights that are read from disk in every pass, because the target does not fit in memory.

    Attributes:
        layers: Number of layers whose feed-forward weights are streamed.
        all_layers: Number of layers that could be streamed.
        bytes_per_pass: Number of bytes read in each pass. If passes read only the experts that they use, this
            is an estimate for a pass over one token.
        disk_bytes_per_second: Measured read speed of the disk.
        substitute_bytes: Size in bytes of the low-bit copies of these weights, with which the target drafts.
            0 if there are none.
        network_drive: Type of the network file system that holds the model, such as `nfs4`. Empty if the
            model is on a local disk.
        expert_bytes: Size of all experts, if passes read only those that they use. 0 if whole layers are
            streamed.
        kept_expert_bytes: Size of the experts that stay in memory.
    """

    layers: int
    all_layers: int
    bytes_per_pass: int
    disk_bytes_per_second: float
    substitute_bytes: int = 0
    network_drive: str = ""
    expert_bytes: int = 0
    kept_expert_bytes: int = 0

    @property
    def kept_layers(self) -> int:
        """Number of layers whose feed-forward weights stay in memory."""
        # The first layer is not in `all_layers`, because it is never streamed.
        return 1 + self.all_layers - self.layers

    @property
    def warning(self) -> str:
        """User-facing clause that says why reading from this disk is slow. Empty if it is not."""
        if self.network_drive:
            return f"the model is on a network drive ({self.network_drive}); copy it to an SSD if you can"
        if self.disk_bytes_per_second < SLOW_DISK_BYTES_PER_SECOND:
            return "the model is on a slow disk; move it to an SSD if you can"
        return ""

    @property
    def seconds_per_pass(self) -> float:
        """Time needed to read one pass's weights from disk, in seconds."""
        return self.bytes_per_pass / self.disk_bytes_per_second

    def seconds_of_pass(self, width: int) -> float:
        """Return the time needed to read the weights of a pass over `width` tokens, in seconds.

        The more tokens a pass has, the more experts it uses. Their choices are assumed to be independent.
        """
        absent_bytes = self.expert_bytes - self.kept_expert_bytes
        if absent_bytes <= 0:
            return self.seconds_per_pass
        unused = 1 - min(1.0, self.bytes_per_pass / absent_bytes)
        return absent_bytes * (1 - unused**width) / self.disk_bytes_per_second

    @property
    def text(self) -> str:
        """User-facing clause that says how many bytes each pass reads, and how long that takes."""
        if self.expert_bytes:
            return (
                f"by estimate, {format_bytes(self.bytes_per_pass)} of experts are read from disk for every"
                f" token, which takes about {format_rate(self.seconds_per_pass)} s at"
                f" {format_rate(self.disk_bytes_per_second / 1e9)} GB/s"
            )
        size = format_bytes(self.substitute_bytes)
        copies = f"; tokens are drafted with low-bit copies of these parts ({size})"
        return (
            f"{format_bytes(self.bytes_per_pass)} of the model is read from disk for every token, which"
            f" takes about {format_rate(self.seconds_per_pass)} s at"
            f" {format_rate(self.disk_bytes_per_second / 1e9)} GB/s"
            + (copies if self.substitute_bytes else "")
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures shown by `edgespec plan --json`."""
        return {
            "layers": self.layers,
            "kept_layers": self.kept_layers,
            "bytes_per_pass": self.bytes_per_pass,
            "disk_bytes_per_second": round(self.disk_bytes_per_second),
            "seconds_per_pass": round(self.seconds_per_pass, 3),
            "substitute_bytes": self.substitute_bytes,
            **(
                {
                    "is_estimate": True,
                    "expert_bytes": self.expert_bytes,
                    "kept_expert_bytes": self.kept_expert_bytes,
                }
                if self.expert_bytes
                else {}
            ),
            **({"warning": self.warning} if self.warning else {}),
        }


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned memory use of the target, its drafters and this process, compared with a budget.

    Attributes:
        budget: Limits on memory use.
        context_tokens: Size of the target's context.
        kv_type: User-facing name of the target's KV cache data type.
        items: All planned memory except the prefix cache, which is evicted on demand.
        decisions: Reductions that the planner made to fit the items into the budget.
        prefix_cache_bytes: Size limit of the prefix cache, which uses the memory that the items leave free.
        machines: The target's shares on several machines, this machine's first. Empty without workers.
        streaming: What is read from disk in every pass, or None if the models fit in memory.
        experts: Where the target's experts are. None if there are no experts, or no GPU with dedicated
            memory.
        why_experts_stay: Why the option `experts` has no effect. Empty if it takes effect or is not set.
    """

    budget: Budget
    context_tokens: int
    kv_type: str
    items: tuple[Item, ...]
    decisions: tuple[Decision, ...] = ()
    prefix_cache_bytes: int = 0
    machines: tuple[MachineShare, ...] = ()
    streaming: Streaming | None = None
    experts: ExpertShares | None = None
    why_experts_stay: str = ""

    @property
    def fits(self) -> bool:
        """Whether the plan fits in system memory and, if separate, GPU memory."""
        return all(self.free_bytes(pool) >= 0 for pool in self.pools)

    @property
    def fits_without_streaming(self) -> bool:
        """Whether the plan fits with all weights in memory."""
        return self.fits and self.streaming is None

    @property
    def unused_experts(self) -> str:
        """User-facing message if the option `experts` has no effect, otherwise an empty string."""
        return f"--experts has no effect: {self.why_experts_stay}" if self.why_experts_stay else ""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """This machine's memory pools: system memory and, if separate, GPU memory."""
        return ("memory",) if self.budget.gpu_bytes is None else ("memory", "gpu")

    def budget_bytes(self, pool: Pool) -> int:
        """Return how many bytes of a memory pool this process may use."""
        return (self.budget.gpu_bytes or 0) if pool == "gpu" else self.budget.bytes

    def planned_bytes(self, pool: Pool) -> int:
        """Return how many bytes the plan needs in a memory pool."""
        return sum(item.bytes for item in self.items if item.pool == pool)

    def free_bytes(self, pool: Pool) -> int:
        """Return how many bytes of a memory pool the plan leaves free. Negative if the pool is too small."""
        return self.budget_bytes(pool) - self.planned_bytes(pool)

    def has_room_for_context(self, tokens: int) -> bool:
        """Return whether a context of `tokens` fits too, if all caches grow in proportion to the context."""
        growth = max(0.0, tokens / self.context_tokens - 1)
        return all(
            growth * sum(item.bytes for item in self.items if (item.kind, item.pool) == ("cache", pool))
            <= self.free_bytes(pool)
            for pool in self.pools
        )

    @property
    def total_bytes(self) -> int:
        """Total memory that the plan needs, in bytes."""
        return sum(item.bytes for item in self.items)

    @property
    def target_cache_bytes(self) -> int:
        """Size of the target's KV cache in bytes, with a full context for every concurrent reply."""
        return sum(item.bytes for item in self.items if (item.role, item.kind) == ("target", "cache"))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the JSON object printed by `edgespec plan --json`."""
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
            **({"streaming": self.streaming.to_json()} if self.streaming else {}),
            **({"experts": asdict(self.experts)} if self.experts else {}),
            **({"why_experts_stay": self.why_experts_stay} if self.why_experts_stay else {}),
            **({"machines": [_share_json(share) for share in self.machines]} if self.machines else {}),
        }


def _share_json(share: MachineShare) -> dict[str, Any]:
    return {
        "name": share.name,
        "layers": share.layers,
        "parts": share.parts,
        "output_layer": share.has_output,
        "weight_bytes": share.weight_bytes,
        "cache_bytes": share.cache_bytes,
        "compute_bytes": share.compute_bytes,
        "total_bytes": share.total_bytes,
    }


def create_items(role: str, estimate: MemoryEstimate) -> tuple[Item, ...]:
    """Return the memory plan items of one model, one per purpose and pool."""
    sizes: Counter[tuple[ModelMemoryKind, Pool]] = Counter()
    for part in estimate.parts:
        sizes[part.kind, part.pool] += part.bytes
    return tuple(
        Item(role, f"{role} {_NAMES[kind]}", kind, size, pool) for (kind, pool), size in sizes.items() if size
    )


def shared_items(models_bytes: int, process_bytes: int, headroom_bytes: int | None) -> tuple[Item, ...]:
    """Return the plan items that do not belong to any one model: the process and the headroom.

    Args:
        models_bytes: Planned memory of all models.
        process_bytes: Memory of Python and its libraries.
        headroom_bytes: The headroom, or None for 5 % of `models_bytes` but at least 64 MiB.
    """
    if headroom_bytes is None:
        headroom_bytes = max(MIN_HEADROOM_BYTES, int(models_bytes * HEADROOM_SHARE))
    return (
        Item("Python", "Python and its libraries", "process", process_bytes),
        Item("free", "headroom", "headroom", headroom_bytes),
    )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory currently used by a runtime.

    Attributes:
        weight_bytes: Size of the target's and draft model's weights.
        kv_bytes: Current size of the target's and draft model's KV caches.
        resident_bytes: Resident memory of the process, including memory-mapped weights read so far.
        plan: The memory plan made before loading.
        context_tokens: Current size of the target's context.
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
