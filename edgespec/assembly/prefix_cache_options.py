"""Create the prefix cache of a loaded target."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from edgespec.backends.base import LanguageModel, LoadOptions
from edgespec.backends.registry import format_at
from edgespec.costs.target_costs import PassCosts
from edgespec.errors import ModelFileError
from edgespec.files import file_state, sampled_sha256
from edgespec.memory import MemoryPlan
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheDisk, ReuseCosts, max_copy_bytes
from edgespec.saved_arrays import models_fingerprint

__all__ = ["create_prefix_cache", "file_states"]

# Assumed per-token speed-up of prefill over decoding, until a prefill has been timed.
_PREFILL_SPEEDUP = 4.0
# Assumed memory bandwidth during decoding, until a prefill has been timed.
_ASSUMED_BYTES_PER_SECOND = 1e10


def file_states(target: Path, adapter: str | None) -> tuple[str, ...]:
    """Return the `file_state` of each of a model's files, to detect later changes.

    Returns an empty tuple if a file's state cannot be read.
    """
    try:
        files = format_at(target).files(target)
        files += sorted(Path(adapter).iterdir()) if adapter is not None else []
        return tuple(map(file_state, files))
    except (OSError, ModelFileError):
        return ()


def create_prefix_cache(
    place: str,
    disk_bytes: int | None,
    target: LanguageModel,
    load_options: LoadOptions,
    costs: PassCosts,
    plan: MemoryPlan,
    states_before: tuple[str, ...],
) -> PrefixCache | None:
    """Create the prefix cache of a loaded target.

    Return None if `place` is `none`. `states_before` is the result of `file_states` before loading. If the
    files have changed since then, the loaded weights are unknown, so nothing is cached on disk.
    """
    if place == "none":
        return None
    disk, notice = None, ""
    if place == "disk":
        identity = _identity(target, load_options, costs, states_before)
        if states_before and file_states(Path(target.facts.path), load_options.adapter) == states_before:
            disk = PrefixCacheDisk(identity, disk_bytes)
        else:
            notice = "prefixes are not cached on disk: the model's files changed while they were loaded"
    prefill_seconds = target.facts.weight_bytes / _ASSUMED_BYTES_PER_SECOND / _PREFILL_SPEEDUP
    return PrefixCache(
        target,
        plan.prefix_cache_bytes,
        disk,
        reuse_costs=ReuseCosts(prefill_seconds),
        max_copied_bytes=max_copy_bytes(plan.free_bytes("memory")),
        reserve_bytes=plan.budget.reserve_bytes,
        notice=notice,
    )


def _identity(target: LanguageModel, options: LoadOptions, costs: PassCosts, states: tuple[str, ...]) -> str:
    """Return a digest of all files and settings that affect the values in the KV cache."""
    stored = (options.kv_type, options.flash_attention, options.gpu_layers, options.low_bits)
    parts = [
        models_fingerprint(target.facts),
        costs.settings_key,
        repr(stored),
        target.facts.rollback,
        target.facts.cache_variant,
        *states,
    ]
    if not target.facts.capabilities.prefix_reuse_exact:
        # Whether prefix reuse is bit-exact depends on the number of CPU cores and determines which prefixes
        # are cached. Do not mix the prefixes of both cases.
        parts.append("read in whole pieces")
    if options.adapter is not None:
        for path in sorted(Path(options.adapter).iterdir()):
            with suppress(OSError):
                parts.append(sampled_sha256(path))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
