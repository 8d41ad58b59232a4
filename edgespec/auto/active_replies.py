"""Count the replies that this process is generating concurrently.

Concurrent replies share the machine and slow each other down, so the controller measures costs separately for
each count.
"""

from __future__ import annotations

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Thread-safe set of the replies that are being generated.

    It uses no lock, because a reply can also end during garbage collection, in the middle of another call.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    @property
    def count(self) -> int:
        """Number of replies that are being generated."""
        return len(self._ids)

    def add(self, reply: object) -> None:
        """Add a reply, which must stay in memory until `discard`, because only its id is stored."""
        self._ids.add(id(reply))

    def discard(self, reply: object) -> None:
        """Remove a reply, or do nothing if it is not in the set."""
        self._ids.discard(id(reply))


# Shared by all runtimes in this process.
ACTIVE_REPLIES = ActiveReplies()
