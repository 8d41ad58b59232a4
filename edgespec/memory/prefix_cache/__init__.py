"""Cache the KV states of earlier prompts and replies in memory and on disk.

A prompt that begins with cached tokens does not need to be prefilled from the beginning.
"""

from edgespec.memory.prefix_cache.cache import PrefixCache, PrefixCacheUsage
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, default_disk_bytes, delete_cached_prefixes
from edgespec.memory.prefix_cache.head_state import HeadState
from edgespec.memory.prefix_cache.reuse import ReuseCosts, reusable_tokens
from edgespec.memory.prefix_cache.store import SegmentStore, default_memory_bytes, max_copy_bytes

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
