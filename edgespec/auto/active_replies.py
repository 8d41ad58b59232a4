"""Count the replies that this process is generating concurrently.

Concurrent replies share the machine and slow each other down, so the controller measures costs separately for
each count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ACTIVE_REPLIES", "ActiveReplies"]


class ActiveReplies:
    """Thread-safe counter of running replies, including those whose caller has stopped reading."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a reply for the duration of the `with` block."""
        with self._lock:
            self.count += 1
        try:
            yield
        finally:
            with self._lock:
                self.count -= 1


# Process-wide counter, shared by all runtimes.
ACTIVE_REPLIES = ActiveReplies()
