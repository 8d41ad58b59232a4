"""What several texts have read is kept, in memory and on disk, so that going back to one reads it no more."""

from edgespec.memory.prefix_cache.cache import PrefixCache
from edgespec.memory.prefix_cache.store import RESERVE_BYTES, Copies, copy_bound, memory_bound
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, disk_bound, forget_kept
from edgespec.memory.prefix_cache.reuse_costs import Worth
from edgespec.memory.prefix_cache.reusable_prefix import PIECE_TOKENS, sure_tokens
from edgespec.memory.prefix_cache.usage import PrefixCacheUsage

__all__ = [
    "PIECE_TOKENS",
    "RESERVE_BYTES",
    "Copies",
    "PrefixCache",
    "PrefixCacheDisk",
    "PrefixCacheUsage",
    "Worth",
    "copy_bound",
    "disk_bound",
    "forget_kept",
    "memory_bound",
    "sure_tokens",
]
