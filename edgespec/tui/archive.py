"""Non-blocking access to the saved chats."""

from __future__ import annotations

import asyncio

from edgespec.chat.store import ChatStore, SavedChat, StoredChat
from edgespec.errors import ChatFileError, EdgespecError
from edgespec.tui.open_chat import OpenChat

__all__ = ["Archive"]


class Archive:
    """Asynchronous wrapper around a `ChatStore`. Runs one call at a time. Methods can raise ChatFileError."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()

    async def save(self, chat: OpenChat, target: str) -> bool:
        """Save the chat unless it is empty, assigning an ID if it has none.

        If another program has changed the file in the meantime, that version is kept and this chat is saved
        under a new ID.

        Returns:
            True if the chat was saved under a new ID because another program had changed the file.
        """
        if not chat.entries:
            return False
        async with self._lock:
            chat.id = chat.id or self._store.new_id()
            snapshot = chat.saved(target)
            saved = await asyncio.to_thread(self._store.save_after, snapshot, chat.saved_at)
            chat.id, chat.saved_at = saved.id, saved.updated
        return saved.id != snapshot.id

    async def list(self) -> list[StoredChat]:
        """Return all chats, newest first."""
        async with self._lock:
            return await asyncio.to_thread(self._store.list)

    async def find(self, wanted: str) -> StoredChat | None:
        """Return the chat with this ID, or the newest one whose title contains this text.

        `last` means the newest chat. Returns None if there is no such chat.
        """
        chats = await self.list()
        if wanted == "last":
            return next((chat for chat in chats if not chat.problem), None)
        words = wanted.casefold()
        return next((chat for chat in chats if wanted == chat.id or words in chat.title.casefold()), None)

    async def load(self, chat_id: str) -> SavedChat:
        """Read and return a saved chat."""
        async with self._lock:
            return await asyncio.to_thread(self._store.load, chat_id)

    async def delete(self, chat_id: str) -> None:
        """Delete a chat, all saved replies and the prefix cache.

        Saved replies and cached prefixes do not record which chat they belong to, so all of them are deleted.
        """
        async with self._lock:
            await asyncio.to_thread(self._store.delete, chat_id)
            await asyncio.to_thread(_delete_chat_data)


def _delete_chat_data() -> None:
    import edgespec

    try:
        edgespec.delete_data("replies")
        edgespec.delete_data("prefix-cache")
    except EdgespecError as error:
        raise ChatFileError(f"the chat was deleted, but {error.what}", error.next_step) from error
