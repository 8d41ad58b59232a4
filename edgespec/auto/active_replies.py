"""How many replies this process is making at once: they share its machine, and each slows down the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Counts replies from their beginning to their end, in whichever threads they are made.

    replies: that are being made now; one whose pieces nobody takes counts too.
    """

    def __init__(self) -> None:
        self.replies = 0
        self._counting = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A reply is made in here."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._counting:
            self.replies += more


# Of this process.
ACTIVE_REPLIES = ActiveReplies()
