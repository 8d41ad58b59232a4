"""The protocol for heads whose state the prefix cache stores together with their target's KV state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["HeadState"]


class HeadState(Protocol):
    """The state of a head that drafts from its target's hidden states. Implemented by `HeadCache`.

    The methods never raise, because a head without its state can still draft, just less accurately.
    """

    name: str

    @property
    def token_bytes(self) -> float:
        """Size of the head's state per token in bytes."""

    def copy(self, tokens: Sequence[int], start: int) -> bytes:
        """Return a copy of the state for `tokens[start:]`. `tokens` is a prefix of the target's cache."""

    def restore(self, tokens: Sequence[int], copy: bytes) -> None:
        """Load a copy once the target has restored the same tokens. `tokens` is the target's whole cache."""

    def needs_last_state(self, tokens: Sequence[int]) -> bool:
        """Return whether the head needs the target to reprocess the last of `tokens`."""
