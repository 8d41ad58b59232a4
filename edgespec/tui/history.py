"""The history of sent messages, which Up and Down browse as in a shell."""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.chat.prompt_history import PromptHistory

__all__ = ["History"]

_MAX_MESSAGES = 500


class History:
    """The messages that the user has sent, and the unsent text in the input.

    Args:
        saved: The file of prompts from earlier runs, which also receives new prompts. If None, no prompts are
            read or saved.
    """

    def __init__(self, saved: PromptHistory | None = None) -> None:
        self._saved = saved
        self._sent: list[str] = saved.read() if saved is not None else []
        self._place = len(self._sent)
        self._unsent = ""

    def add(self, text: str) -> None:
        """Append a sent message, and save it."""
        if self._append(text) and self._saved is not None:
            self._saved.add(text)

    def _append(self, text: str) -> bool:
        new = bool(text.strip()) and self._sent[-1:] != [text]
        if new:
            self._sent.append(text)
            del self._sent[:-_MAX_MESSAGES]
        self._place = len(self._sent)
        self._unsent = ""
        return new

    def seed(self, texts: Iterable[str]) -> None:
        """Add the user messages of an opened chat to the input history."""
        for text in texts:
            self._append(text)

    def older(self, current: str) -> str | None:
        """Go to the previous message and return it, or None at the oldest. `current` is the input's text."""
        if self._place == 0:
            return None
        if self._place == len(self._sent):
            self._unsent = current
        self._place -= 1
        return self._sent[self._place]

    def newer(self) -> str | None:
        """Go to the next message and return it. After the newest, return the unsent text, then None."""
        if self._place == len(self._sent):
            return None
        self._place += 1
        return self._unsent if self._place == len(self._sent) else self._sent[self._place]
