"""What is kept, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefixCacheUsage"]


@dataclass(frozen=True, slots=True)
class PrefixCacheUsage:
    """What is kept, and what that was good for.

    memory_bytes, disk_bytes: what the pieces of this model take; a piece may be in both. texts: ends of texts
    that can be gone back to. hits: how often one was. reused_tokens: tokens that need not be read again so.
    """

    texts: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    hits: int = 0
    reused_tokens: int = 0
    notice: str = ""
