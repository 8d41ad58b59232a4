"""Count the replies that this process is generating concurrently.

Concurrent replies slow each other down. Costs are therefore tracked separately for each number of replies.
"""

from __future__ import annotations

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Thread-safe set of the replies in progress.

    Relies on atomic set operations. A lock could deadlock if garbage collection calls `discard`.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    @property
    def count(self) -> int:
        """Number of replies in progress."""
        return len(self._ids)

    def add(self, reply: object) -> None:
        """Add a reply. Call `discard` before the reply is deleted, because its `id` can be reused."""
        self._ids.add(id(reply))

    def discard(self, reply: object) -> None:
        """Remove a reply if it is present."""
        self._ids.discard(id(reply))


ACTIVE_REPLIES = ActiveReplies()
