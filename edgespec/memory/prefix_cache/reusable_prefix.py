"""Compute how many tokens of a cached prefix can be reused without changing a reply."""

from __future__ import annotations

from edgespec.backends.base import Capabilities

__all__ = ["REUSE_BLOCK_TOKENS", "reusable_tokens"]

# Block size for prefill, counted from the beginning of the prompt, on models whose KV state depends on the
# width of passes. A heuristic: wide enough for fast prefill, while few tokens at the end are lost.
REUSE_BLOCK_TOKENS = 256


def reusable_tokens(capabilities: Capabilities, length: int) -> int:
    """Return how many of the first `length` cached tokens have the same KV state as after a new prefill.

    If reuse is exact, these are all tokens. Otherwise, they are the tokens in whole blocks, or none if the
    model cannot truncate its cache without rerunning tokens.
    """
    if capabilities.prefix_reuse_exact:
        return length
    return length - length % REUSE_BLOCK_TOKENS if capabilities.partial_truncate else 0
