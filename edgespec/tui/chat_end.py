"""The outcome of a chat, and the `--resume` value that opens it again."""

from __future__ import annotations

from typing import NamedTuple

from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.tui.open_chat import OpenChat

__all__ = ["ChatEnd", "resume_value"]


class ChatEnd(NamedTuple):
    """The outcome of a terminal chat.

    Attributes:
        signalled: Whether a signal ended the chat.
        resume: The value of `--resume` that opens the same chat: `last` or the chat's ID. Empty if the chat
            has no messages.
        switched_to: A reference to the model in use at the end. Empty if the user never switched models.
    """

    signalled: bool = False
    resume: str = ""
    switched_to: str = ""


def resume_value(chat: OpenChat, store: ChatStore) -> str:
    """Return the value of `--resume` that opens the chat. Empty if the chat has no messages."""
    if not chat.entries:
        return ""
    try:
        newest = next((each.id for each in store.list() if not each.problem), "")
    except ChatFileError:
        newest = ""
    return "last" if chat.id == newest else chat.id
