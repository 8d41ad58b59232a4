"""What the person likes to see, kept from one run to the next. Losing it must never hurt."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from edgespec.files import write_private_file

__all__ = ["Preferences"]


@dataclass(slots=True)
class Preferences:
    """Which parts are shown, and in which theme."""

    light: bool = False
    details: bool = False
    origin: bool = False
    sidebar: bool = False

    @classmethod
    def read(cls, path: Path) -> Preferences:
        """The kept preferences; the defaults for whatever cannot be read."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return cls()
        if not isinstance(data, dict):
            return cls()
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in data.items() if name in names and isinstance(value, bool)}
        return cls(**known)

    def write(self, path: Path) -> None:
        """Keep them, if that is possible: a full disk must not disturb the chat."""
        with suppress(OSError):
            write_private_file(path, json.dumps(asdict(self)).encode())
