"""Chooses which saved chat to resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `edgespec --help` imports this module and should be fast
    from edgespec.chat.store import StoredChat

__all__ = ["LAST", "chosen"]

LAST = "last"
"""Stands for the newest chat."""


def chosen(chats: Sequence[StoredChat], wanted: str) -> StoredChat | None:
    """Find the chat with the given id, or else the newest chat with the given text in its title.

    Args:
        chats: The saved chats, newest first.
        wanted: An id, part of a title, or `last`.

    Returns:
        The matching chat, or None if there is none.
    """
    if wanted == LAST:
        return next((chat for chat in chats if not chat.problem), None)
    words = wanted.casefold()
    return next((chat for chat in chats if wanted == chat.id or words in chat.title.casefold()), None)
