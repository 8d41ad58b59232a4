"""Create the prefix cache of a loaded target."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.memory.plan import MemoryPlan
from edgespec.memory.prefix_cache.cache import HeadState, PrefixCache
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk
from edgespec.memory.prefix_cache.store import ReuseCosts, max_copy_bytes
from edgespec.methods.costs.target_costs import PassCosts
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import all_files, backend_of, format_at
from edgespec.store.saved_arrays import models_fingerprint
from edgespec.system.files import file_state


def file_states(target: Path, adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return the state of every model and adapter file, so that later changes can be detected.

    Returns an empty tuple if the state of a file cannot be read.
    """
    try:
        files = format_at(target).files(target)
        files += [file for adapter in adapters for file in all_files(Path(adapter.path))]
        return tuple(map(file_state, files))
    except (OSError, ModelFileError):
        return ()


def create_prefix_cache(
    place: str,
    disk_bytes: int | None,
    target: LanguageModel,
    heads: Sequence[HeadState],
    load_options: LoadOptions,
    costs: PassCosts,
    plan: MemoryPlan,
    states_before: tuple[str, ...],
) -> PrefixCache | None:
    """Create the prefix cache of a loaded target, or return None if `place` is `none`.

    Args:
        place: Where to cache prefixes: `none`, `memory` or `disk`.
        disk_bytes: The size limit of the cache on disk, or None for the default.
        target: The loaded target.
        heads: The heads that draft for the target.
        load_options: The options that the target was loaded with.
        costs: The durations of the target's forward passes.
        plan: The memory plan.
        states_before: The result of `file_states` before loading. If the files have changed since, nothing is
            cached on disk, because it is unclear which weights were loaded.
    """
    if place == "none":
        return None
    disk, notice = None, ""
    if place == "disk":
        identity = _identity(target, load_options, costs, states_before)
        if states_before and file_states(Path(target.facts.path), load_options.adapters) == states_before:
            disk = PrefixCacheDisk(identity, disk_bytes)
        else:
            notice = (
                "not caching earlier chats on disk: the model's files changed while they were being loaded"
            )
    return PrefixCache(
        target,
        plan.prefix_cache_bytes,
        disk,
        heads=heads,
        reuse_costs=ReuseCosts(),
        max_copied_bytes=max_copy_bytes(plan.free_bytes("memory")),
        reserve_bytes=plan.budget.reserve_bytes,
        notice=notice,
    )


def _identity(target: LanguageModel, options: LoadOptions, costs: PassCosts, states: tuple[str, ...]) -> str:
    """Return a digest of all files and settings that affect KV cache values."""
    stored = (options.kv_type, options.flash_attention, options.gpu_layers, options.low_bits)
    capabilities = target.facts.capabilities
    parts = [
        models_fingerprint(target.facts),
        backend_of(format_at(Path(target.facts.path)).name).build_identity(),
        costs.settings_key,
        repr(stored),
        target.facts.rollback,
        target.facts.cache_variant,
        *states,
    ]
    if capabilities.exact:
        # Bit-exact passes round differently from unrestricted ones.
        parts.append(f"exact with {target.max_threads} threads" if costs.fixes_threads else "exact")
    if not capabilities.prefix_reuse_exact:
        parts.append("read in whole pieces")
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
