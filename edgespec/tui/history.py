"""What was sent before, walked with Up and Down like in a shell."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["History"]

_LIMIT = 500


class History:
    """Sent texts, oldest first, and a place in them. The unsent text is kept while walking."""

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._place = 0
        self._unsent = ""

    def add(self, text: str) -> None:
        """Remember a sent text and go back to the end."""
        if text.strip() and (not self._sent or self._sent[-1] != text):
            self._sent.append(text)
            del self._sent[:-_LIMIT]
        self.rewind()

    def seed(self, texts: Iterable[str]) -> None:
        """Remember the texts of an opened chat."""
        for text in texts:
            self.add(text)

    def rewind(self) -> None:
        """Go back to the end: the next `older` gives the newest text."""
        self._place = len(self._sent)
        self._unsent = ""

    def older(self, current: str) -> str | None:
        """The text before, or None at the oldest."""
        if self._place == 0:
            return None
        if self._place == len(self._sent):
            self._unsent = current
        self._place -= 1
        return self._sent[self._place]

    def newer(self) -> str | None:
        """The text after, the unsent text at the end, or None when already there."""
        if self._place == len(self._sent):
            return None
        self._place += 1
        return self._unsent if self._place == len(self._sent) else self._sent[self._place]
