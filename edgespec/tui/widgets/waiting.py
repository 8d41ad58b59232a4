"""The messages that wait for the end of the running reply, shown above the input."""

from __future__ import annotations

from typing import Any

from textual.content import Content
from textual.widgets import Static

__all__ = ["WaitingMessages"]

# Maximum number of messages to show.
_MAX_SHOWN = 4


class WaitingMessages(Static):
    """Messages that the user sent during a reply. They are sent one after the other when it ends.

    Attributes:
        texts: The messages, oldest first.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Add a message, which is sent after those that wait already."""
        self.texts.append(text)
        self._show()

    def take(self, place: int) -> str:
        """Remove a message and return it: the oldest one (0) or the newest one (-1)."""
        text = self.texts.pop(place)
        self._show()
        return text

    def take_all(self) -> str:
        """Remove all messages and return them as one text, separated by blank lines."""
        texts, self.texts = self.texts, []
        self._show()
        return "\n\n".join(texts)

    def _show(self) -> None:
        rows = [Content.assemble(("Waiting  ", "$primary"), " ".join(text.split())) for text in self.texts]
        if len(rows) > _MAX_SHOWN:
            hidden = len(rows) - _MAX_SHOWN + 1
            rows = [Content.styled(f"{hidden} older messages wait too", "$muted"), *rows[hidden:]]
        self.update(Content("\n").join(rows))
        self.display = bool(rows)
