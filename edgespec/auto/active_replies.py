"""Count the replies that this process is generating concurrently.

Concurrent replies slow each other down. Costs are therefore tracked separately for each number of replies.
"""

from __future__ import annotations

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Thread-safe set of the replies that are being generated.

    It has no lock, because a reply that ends during garbage collection could then cause a deadlock.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    @property
    def count(self) -> int:
        """Number of replies that are being generated."""
        return len(self._ids)

    def add(self, reply: object) -> None:
        """Add a reply. Keep a reference to the reply until you call `discard`."""
        self._ids.add(id(reply))

    def discard(self, reply: object) -> None:
        """Remove a reply if it is present."""
        self._ids.discard(id(reply))


ACTIVE_REPLIES = ActiveReplies()
