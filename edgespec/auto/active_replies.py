"""Number of replies that this process generates at the same time.

They share the machine, so each one slows down the others' passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Counts replies from start to end. Any thread may use it.

    Attributes:
        count: Replies that are running now, including those whose caller does not read on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a reply for the duration of the `with` block."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            self.count += change


# The replies of this process.
ACTIVE_REPLIES = ActiveReplies()
