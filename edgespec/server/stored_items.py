"""Keep items of recent responses, so that later requests can refer to them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["StoredItems"]

# Maximum total size of all items in bytes: about 400 replies of the default maximum length.
_MAX_BYTES = 16 * 2**20


class StoredItems:
    """Items of recent responses, as JSON, keyed by id. Use only in the event loop.

    If the total size exceeds `max_bytes`, the oldest items are removed. Any client that knows an item's id
    can use it, so ids must be unguessable.

    Args:
        max_bytes: Maximum total size of the items in bytes.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = 0

    def add(self, item: Mapping[str, Any]) -> None:
        """Store an item, which must have a unique `id`."""
        data = json.dumps(item, ensure_ascii=False).encode("utf-8", "replace")
        self._items[item["id"]] = data
        self._size_bytes += len(data)
        while self._size_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._size_bytes -= len(oldest)

    def get(self, item_id: str) -> bytes | None:
        """Return an item as JSON, or None if there is none with this id."""
        return self._items.get(item_id)
