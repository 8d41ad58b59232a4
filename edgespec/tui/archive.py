"""The saved chats, reached without making the screen wait for the disk."""

from __future__ import annotations

import asyncio
from datetime import datetime

from edgespec.chat.store import ChatStore, SavedChat, StoredChat
from edgespec.errors import ChatFileError, EdgespecError
from edgespec.tui.open_chat import OpenChat

__all__ = ["Archive"]


class Archive:
    """Store calls in a thread, one after the other. They raise ChatFileError."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        # When each chat was changed last, as far as it is known here.
        self._updated: dict[str, datetime] = {}

    async def save(self, chat: OpenChat, target: str) -> bool:
        """Save the chat as it is now, giving it an id the first time. An empty chat is not saved.

        True where another program has changed the chat meanwhile: what it wrote stays, and the chat has
        a new id.
        """
        if not chat.entries:
            return False
        async with self._lock:
            if not chat.id:
                chat.id = self._store.new_id()
            wanted = chat.saved(target)
            known = self._updated.get(wanted.id)
            saved = await asyncio.to_thread(self._store.save_after, wanted, known)
            chat.id = saved.id
            self._updated[saved.id] = saved.updated
        return saved.id != wanted.id

    async def list(self) -> list[StoredChat]:
        """All chats, newest first."""
        async with self._lock:
            return await asyncio.to_thread(self._store.list)

    async def load(self, chat_id: str) -> SavedChat:
        """One chat."""
        async with self._lock:
            chat = await asyncio.to_thread(self._store.load, chat_id)
            self._updated[chat.id] = chat.updated
            return chat

    async def delete(self, chat_id: str) -> None:
        """Remove one chat, and with it what is kept of chats for later ones: to guess from, and as read.

        Nobody knows any more which of that is of it: all goes.
        """
        async with self._lock:
            await asyncio.to_thread(self._store.delete, chat_id)
            await asyncio.to_thread(_forget_texts)


def _forget_texts() -> None:
    import edgespec

    try:
        edgespec.delete_data("replies")
        edgespec.delete_data("prefix-cache")
    except EdgespecError as error:
        raise ChatFileError(f"the chat is deleted, but {error.what}", error.next_step) from error
