"""What a runtime keeps of the texts it has read: where, and how much."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends.base import LanguageModel, LoadOptions
from edgespec.backends.registry import format_at
from edgespec.checks import check_text, parse_size
from edgespec.costs.target_costs import PassCosts
from edgespec.errors import ModelFileError, OptionError
from edgespec.files import sampled_sha256
from edgespec.memory import MemoryPlan
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheDisk, ReuseCosts, max_copy_bytes
from edgespec.saved_arrays import models_fingerprint

__all__ = ["PLACES", "PrefixCacheOptions", "create_prefix_cache", "file_states"]

PLACES = ("none", "memory", "disk")
# Tokens that are read together cost less than single steps: so many times, until it was measured.
_READ_FASTER = 4.0
# A single step reads all weights, and memory gives about so much: a guess that the first real reads replace.
_GUESSED_BYTES_PER_SECOND = 1e10


@dataclass(frozen=True, slots=True)
class PrefixCacheOptions:
    """Where cached prefixes are kept, and the size limits; None for the defaults."""

    place: str = "memory"
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    @classmethod
    def read(cls, place: str, memory: str | int | None, disk: str | int | None) -> PrefixCacheOptions:
        """From the options of `load`. Raises OptionError."""
        if check_text("prefix_cache", place, "none, memory or disk") not in PLACES:
            raise OptionError(f"prefix_cache is {place!r}", f"choose one of {', '.join(PLACES)}")
        return cls(place, _size("prefix_cache_memory", memory), _size("prefix_cache_disk", disk))

    @property
    def wanted_bytes(self) -> int | None:
        """See `PlanRequest.prefix_cache_bytes`."""
        return 0 if self.place == "none" else self.memory_bytes


def _size(name: str, given: str | int | None) -> int | None:
    return None if given is None else parse_size(name, given)


def file_states(target: Path, adapter: str | None) -> tuple[str, ...]:
    """What the files of a model are like now; () where one cannot be looked at. See `create_prefix_cache`.

    Of each its name, size and times, and which file it is: not every block is looked at. Who writes into one
    changes both of its times, and only the first can be set back.
    """
    try:
        files = format_at(target).files(target)
        files += sorted(Path(adapter).iterdir()) if adapter is not None else []
        return tuple(map(_state, files))
    except (OSError, ModelFileError):
        return ()


def _state(path: Path) -> str:
    status = path.stat()
    which = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return f"{path.name} {' '.join(map(str, which))}"


def create_prefix_cache(
    keeping: PrefixCacheOptions,
    target: LanguageModel,
    options: LoadOptions,
    costs: PassCosts,
    plan: MemoryPlan,
    seen: tuple[str, ...],
) -> PrefixCache | None:
    """What keeps the texts of a target that was loaded with these options; None where nothing is to be kept.

    plan: has the bytes they may take, see `plan_pair`. seen: `file_states` before the load. Where
    that is not how its files are now, nobody knows which were loaded, and nothing is kept on disk.
    """
    if keeping.place == "none":
        return None
    disk, notice = None, ""
    if keeping.place == "disk":
        identity = _identity(target, options, costs, seen)
        if seen and file_states(Path(target.facts.path), options.adapter) == seen:
            disk = PrefixCacheDisk(identity, keeping.disk_bytes)
        else:
            notice = "texts are not kept on disk: the model's files changed while they were loaded"
    return PrefixCache(
        target,
        plan.prefix_cache_bytes,
        disk,
        worth=ReuseCosts(_guessed_seconds(target)),
        max_copied_bytes=max_copy_bytes(plan.free_bytes("memory") + plan.prefix_cache_bytes),
        notice=notice,
    )


def _guessed_seconds(target: LanguageModel) -> float:
    """What reading a token takes, by the bytes of the weights, until some were read."""
    return target.facts.weight_bytes / _GUESSED_BYTES_PER_SECOND / _READ_FASTER


def _identity(target: LanguageModel, options: LoadOptions, costs: PassCosts, seen: tuple[str, ...]) -> str:
    """Another one wherever the same tokens could give another state, or one that rounds otherwise."""
    stored = (options.kv_type, options.flash_attention, options.gpu_layers, options.low_bits)
    told = [
        models_fingerprint(target.facts),
        costs.settings_key,
        repr(stored),
        target.facts.rollback,
        target.facts.cache_variant,
        *seen,
    ]
    if not target.facts.capabilities.prefix_reuse_exact:
        told.append("read in whole pieces")  # not so where there are fewer or more cores to run on
    if options.adapter is not None:
        for path in sorted(Path(options.adapter).iterdir()):
            with suppress(OSError):
                told.append(sampled_sha256(path))
    return hashlib.sha256("\0".join(told).encode()).hexdigest()
