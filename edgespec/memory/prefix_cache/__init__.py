"""What several texts have read is kept, in memory and on disk, so that going back to one reads it no more."""

from edgespec.memory.prefix_cache.cache import PrefixCache
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, default_disk_bytes, delete_cached_prefixes
from edgespec.memory.prefix_cache.reusable_prefix import REUSE_BLOCK_TOKENS, reusable_tokens
from edgespec.memory.prefix_cache.reuse_costs import ReuseCosts
from edgespec.memory.prefix_cache.store import (
    RESERVE_BYTES,
    SegmentStore,
    default_memory_bytes,
    max_copy_bytes,
)
from edgespec.memory.prefix_cache.usage import PrefixCacheUsage

__all__ = [
    "RESERVE_BYTES",
    "REUSE_BLOCK_TOKENS",
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
