"""Which saved chat to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `edgespec --help` needs the name of the last chat only
    from edgespec.chat.store import StoredChat

__all__ = ["LAST", "chosen"]

LAST = "last"
"""Says the newest chat."""


def chosen(chats: Sequence[StoredChat], wanted: str) -> StoredChat | None:
    """The newest chat with that id, or with these words in its title; None where there is none.

    chats: newest first.
    """
    if wanted == LAST:
        return next((chat for chat in chats if not chat.problem), None)
    words = wanted.casefold()
    return next((chat for chat in chats if wanted == chat.id or words in chat.title.casefold()), None)
