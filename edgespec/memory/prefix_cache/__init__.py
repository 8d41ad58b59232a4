"""Cache the KV states of earlier prompts and replies in memory and on disk.

A prompt that begins with cached tokens does not need to be prefilled from the beginning.
"""

from edgespec.memory.prefix_cache.cache import HeadState, PrefixCache, PrefixCacheUsage
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, default_disk_bytes, delete_cached_prefixes
from edgespec.memory.prefix_cache.store import (
    ReuseCosts,
    SegmentStore,
    default_memory_bytes,
    max_copy_bytes,
    reusable_tokens,
)

__all__ = [
    "HeadState",
    "PrefixCache",
    "PrefixCacheDisk",
    "PrefixCacheUsage",
    "ReuseCosts",
    "SegmentStore",
    "default_disk_bytes",
    "default_memory_bytes",
    "delete_cached_prefixes",
    "max_copy_bytes",
    "reusable_tokens",
]
