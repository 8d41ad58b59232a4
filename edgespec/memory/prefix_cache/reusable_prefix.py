"""How much of a text can be gone on from."""

from __future__ import annotations

from edgespec.backends.base import Capabilities

__all__ = ["REUSE_BLOCK_TOKENS", "reusable_tokens"]

# Where it makes a difference in which passes a text was read, every text is read in these from its beginning.
REUSE_BLOCK_TOKENS = 256


def reusable_tokens(able: Capabilities, length: int) -> int:
    """How many of the first `length` tokens any other reading would have left in the cache as they are.

    None in a memory that is brought back to a length by running tokens again.
    """
    if able.prefix_reuse_exact:
        return length
    return length - length % REUSE_BLOCK_TOKENS if able.partial_truncate else 0
