"""Count the replies that this process is generating concurrently.

Concurrent replies share the machine and slow each other down, so the controller measures costs separately for
each count.
"""

from __future__ import annotations

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Thread-safe set of running replies, including those that the caller no longer reads.

    Uses no lock, because replies can also end during garbage collection, which may interrupt any method.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    @property
    def count(self) -> int:
        """Number of running replies."""
        return len(self._ids)

    def add(self, reply: object) -> None:
        """Add a reply.

        The caller must keep a reference to the reply until `discard`, because the set stores only its id.
        """
        self._ids.add(id(reply))

    def discard(self, reply: object) -> None:
        """Remove a reply, if it is in the set."""
        self._ids.discard(id(reply))


# Process-wide, shared by all runtimes.
ACTIVE_REPLIES = ActiveReplies()
