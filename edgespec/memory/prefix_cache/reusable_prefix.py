"""How many tokens of a cached prefix can be reused without changing a reply."""

from __future__ import annotations

from edgespec.backends.base import Capabilities

__all__ = ["REUSE_BLOCK_TOKENS", "reusable_tokens"]

# Prefill runs in blocks of this size, counted from the beginning of the prompt, where the widths of the
# passes change the KV state. Chosen: wide enough for fast prefill, and few tokens are lost at the end.
REUSE_BLOCK_TOKENS = 256


def reusable_tokens(capabilities: Capabilities, length: int) -> int:
    """Return how many of the first `length` cached tokens have the KV state that a new prefill would give.

    All of them where reuse is exact. Otherwise whole blocks, or none if the model cannot truncate its cache
    without running tokens again.
    """
    if capabilities.prefix_reuse_exact:
        return length
    return length - length % REUSE_BLOCK_TOKENS if capabilities.partial_truncate else 0
