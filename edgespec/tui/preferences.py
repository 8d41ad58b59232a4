"""The chat's preferences, which are saved between runs. Errors loading or saving them are ignored."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.chat.saved_chat import ModelReferences
from edgespec.chat.store import ChatStore
from edgespec.system.files import read_regular_file, write_private_file


def preferences_path(store: ChatStore) -> Path:
    """Return the path of the preferences file, which is next to the folder of saved chats."""
    return store.folder.parent / "preferences.json"


@dataclass(slots=True)
class Preferences:
    """The user's choice of theme, visible panels and models.

    Attributes:
        theme: Name of the colour theme.
        details: Whether to show the details column.
        sidebar: Whether to show the list of chats.
        knows_drafting: Whether drafting has already been explained to the user.
        target: Reference to the model that was used last. Empty for the default model.
        draft: Reference to its draft model. Empty for the default.
    """

    theme: str = "dark"
    details: bool = False
    sidebar: bool = False
    knows_drafting: bool = False
    target: str = ""
    draft: str = ""

    @classmethod
    def read(cls, path: Path) -> Preferences:
        """Load the preferences, replacing missing or invalid values with their defaults."""
        try:
            data = json.loads(read_regular_file(path).decode("utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            return cls()
        if not isinstance(data, dict):
            return cls()
        if data.get("light") is True:
            # Earlier versions had only a light and a dark theme, and saved the choice under this name.
            data.setdefault("theme", "light")
        kinds = {field.name: type(field.default) for field in fields(cls)}
        known: dict[str, Any] = {
            name: value for name, value in data.items() if type(value) is kinds.get(name)
        }
        return cls(**known)

    def remember(self, models: ModelReferences, path: Path) -> None:
        """Save the models that the user chose, so that the next chat opens with them."""
        if (self.target, self.draft) != (models.target, models.draft):
            self.target, self.draft = models.target, models.draft
            self.write(path)

    def write(self, path: Path) -> None:
        """Save the preferences. Errors are ignored, because a full disk should not interrupt the chat."""
        with suppress(OSError):
            write_private_file(path, json.dumps(asdict(self)).encode())
