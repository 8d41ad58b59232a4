"""Search saved chats by title, message text and ID."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.chat.store import StoredChat

__all__ = ["FoundChat", "find_chat", "search"]


class FoundChat(NamedTuple):
    """A chat that contains all words of a query.

    Attributes:
        chat: The chat.
        line: The best matching line of the messages. Empty if the title contains all words.
    """

    chat: StoredChat
    line: str = ""


def search(chats: Sequence[StoredChat], query: str) -> list[FoundChat]:
    """Return the chats whose title or messages contain all words of `query`, ignoring case.

    Pinned chats come first. Otherwise, the order is kept. An empty query matches all chats.
    """
    words = query.casefold().split()
    found = []
    for chat in chats:
        title = chat.title.casefold()
        missing = [word for word in words if word not in title]
        if not missing:
            found.append(FoundChat(chat))
        elif all(word in chat.folded_text for word in missing):
            found.append(FoundChat(chat, _best_line(chat, missing)))
    return sorted(found, key=lambda each: not each.chat.pinned)


def find_chat(chats: Sequence[StoredChat], wanted: str) -> StoredChat | None:
    """Return the chat with the ID `wanted`, or else the first chat whose title contains `wanted`.

    Args:
        chats: The chats, newest first.
        wanted: An ID, part of a title, or `last` for the newest readable chat.

    Returns:
        The chat, or None if there is no such chat.
    """
    if wanted == "last":
        return next((chat for chat in chats if not chat.problem), None)
    words = wanted.casefold()
    same_id = next((chat for chat in chats if chat.id == wanted), None)
    return same_id or next((chat for chat in chats if words in chat.title.casefold()), None)


def _best_line(chat: StoredChat, words: Sequence[str]) -> str:
    """Return the line with the most of `words`, starting shortly before the first of them."""
    lines = chat.folded_text.splitlines()
    with_all = (number for number, line in enumerate(lines) if all(word in line for word in words))
    number = next(with_all, -1)
    if number < 0:
        number = max(range(len(lines)), key=lambda each: sum(word in lines[each] for word in words))
    folded, best = lines[number], chat.text.splitlines()[number]
    first = min((at for word in words if (at := folded.find(word)) >= 0), default=0)
    start = best.rfind(" ", 0, max(0, first - 12)) + 1
    return ("…" if start else "") + best[start:].strip()
