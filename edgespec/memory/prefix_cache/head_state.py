"""The protocol for heads whose state the prefix cache stores together with their target's KV state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["HeadState"]


class HeadState(Protocol):
    """The state of a head, which drafts from its target's hidden states. `HeadCache` implements it.

    None of the methods raises an error, because a head without its state still drafts, only less accurately.
    """

    name: str

    @property
    def token_bytes(self) -> float:
        """Size of the head's state per token in bytes."""

    def copy(self, tokens: Sequence[int], start: int) -> bytes:
        """Return a copy of the state for `tokens[start:]`, given the first tokens in the target's cache."""

    def restore(self, tokens: Sequence[int], copy: bytes) -> None:
        """Load a copy after the target has restored the same tokens. `tokens` is the target's whole cache."""

    def needs_last_state(self, tokens: Sequence[int]) -> bool:
        """Return whether the head needs the target to process the last of `tokens` again."""
