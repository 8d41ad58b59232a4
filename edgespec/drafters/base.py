"""The Protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["Drafter"]


class Drafter(Protocol):
    """Guesses tokens. Whatever it proposes, the reply stays the same; only the speed changes."""

    name: str

    def begin(self, tokens: Sequence[int]) -> None:
        """A reply begins after `tokens` (all of the prompt). What is already known is not computed again."""

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """A tree of up to `draft_length` levels whose root is the last token; the root alone when no guess.

        `sampler` stands after the last token; it is left as it was found.
        """

    def commit(self, tokens: tuple[int, ...]) -> None:
        """These tokens were emitted after the last proposal (or without one)."""

    def interrupt(self, wanted: bool) -> None:
        """Stop a running proposal with CancelledError, from any thread; False allows new ones."""

    def close(self) -> None:
        """Free everything the drafter owns."""
