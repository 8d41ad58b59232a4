"""The size and layout of a llama.cpp context."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.backends.llamacpp.kv_types import KvTypes

__all__ = ["MAX_WIDTH", "ContextPlan"]

# By default, a forward pass computes logits for at most this many tokens, which limits the size of the logits
# buffer.
MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The size and layout of a context's KV cache and recurrent states.

    Attributes:
        tokens: The number of KV cells, each of which stores one token.
        kv_types: The data types of keys and values.
        sequences: The maximum number of llama.cpp sequences.
        recurrent: Whether any layers have a recurrent state instead of keys and values.
        undo_tokens: The number of most recent tokens for which llama.cpp keeps the recurrent state, for
            rollback.
        kv_bytes: The total size of KV cells and recurrent states in bytes.
        token_bytes: The size of one KV cell in bytes, for all layers together.
        rows: The maximum number of tokens whose logits a forward pass can compute.
        checkpoint_bytes: The total size of checkpoints in main memory in bytes. 0 if checkpoints are
            llama.cpp sequences.
        slots: The number of replies that share the context. Each gets an equal share of the KV cells and
            sequences.
    """

    tokens: int
    kv_types: KvTypes
    sequences: int
    recurrent: bool = False
    undo_tokens: int = 0
    kv_bytes: int = 0
    token_bytes: int = 0
    rows: int = MAX_WIDTH
    checkpoint_bytes: int = 0
    slots: int = 1

    def with_tokens(self, tokens: int) -> ContextPlan:
        """Return a copy of this plan with a different number of KV cells."""
        added_bytes = (tokens - self.tokens) * self.token_bytes
        return replace(self, tokens=tokens, kv_bytes=self.kv_bytes + added_bytes)

    @property
    def share(self) -> ContextPlan:
        """The part of this plan that belongs to one of the slots."""
        return replace(
            self,
            tokens=self.tokens // self.slots,
            sequences=self.sequences // self.slots,
            kv_bytes=self.kv_bytes // self.slots,
            slots=1,
        )
