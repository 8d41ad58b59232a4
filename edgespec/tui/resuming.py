"""Choice of the saved chat to resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `edgespec --help` imports this module and should be quick.
    from edgespec.chat.store import StoredChat

__all__ = ["LAST", "chosen"]

LAST = "last"
"""Stands for the newest chat."""


def chosen(chats: Sequence[StoredChat], wanted: str) -> StoredChat | None:
    """Return the chat with an id, or the newest one with these words in its title.

    Args:
        chats: The saved chats, newest first.
        wanted: An id, part of a title, or `last`.

    Returns:
        The chat, or None if there is none.
    """
    if wanted == LAST:
        return next((chat for chat in chats if not chat.problem), None)
    words = wanted.casefold()
    return next((chat for chat in chats if wanted == chat.id or words in chat.title.casefold()), None)
