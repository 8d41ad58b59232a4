"""Search the titles and messages of saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.chat.store import StoredChat

__all__ = ["FoundChat", "search"]


class FoundChat(NamedTuple):
    """A chat that contains all words of a query.

    Attributes:
        chat: The chat.
        line: The best matching line of the messages. Empty if the title contains all words.
    """

    chat: StoredChat
    line: str = ""


def search(chats: Sequence[StoredChat], query: str) -> list[FoundChat]:
    """Return the chats whose title or messages contain all words of `query`, ignoring case."""
    words = query.casefold().split()
    found = []
    for chat in chats:
        title = chat.title.casefold()
        missing = [word for word in words if word not in title]
        if not missing:
            found.append(FoundChat(chat))
        elif all(word in chat.folded_text for word in missing):
            found.append(FoundChat(chat, _best_line(chat.text, missing)))
    return found


def _best_line(text: str, words: Sequence[str]) -> str:
    """Return the line that contains the most of `words`, cut off shortly before the first of these words."""
    lines = text.splitlines()
    best = max(lines, key=lambda line: sum(word in line.casefold() for word in words))
    folded = best.casefold()
    first = min((at for word in words if (at := folded.find(word)) >= 0), default=0)
    start = best.rfind(" ", 0, max(0, first - 12)) + 1
    return ("…" if start else "") + best[start:].strip()
