"""Read all facts of a kind from the file that `Facts` writes."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

from edgespec.system.facts import Facts

__all__ = ["saved_facts"]


def saved_facts(kind: str) -> list[Any]:
    """Return the values of all saved facts of a kind, oldest first."""
    path = Facts().path
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT value FROM facts WHERE kind = ? ORDER BY rowid", (kind,))
        return [json.loads(value[4:]) for (value,) in rows]
