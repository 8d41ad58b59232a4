"""The saved chats, reached without making the screen wait for the disk."""

from __future__ import annotations

import asyncio

from edgespec.chat.store import ChatStore, SavedChat, StoredChat
from edgespec.errors import ChatFileError, EdgespecError
from edgespec.tui.session import Session

__all__ = ["Archive"]


class Archive:
    """Store calls in a thread, one after the other. They raise ChatFileError."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()

    async def save(self, session: Session, target: str) -> None:
        """Save the session as it is now, giving it an id the first time. An empty chat is not saved."""
        if not session.lines:
            return
        session.id = session.id or self._store.new_id()
        chat = session.saved(target)
        async with self._lock:
            await asyncio.to_thread(self._store.save, chat)

    async def list(self) -> list[StoredChat]:
        """All chats, newest first."""
        async with self._lock:
            return await asyncio.to_thread(self._store.list)

    async def load(self, chat_id: str) -> SavedChat:
        """One chat."""
        async with self._lock:
            return await asyncio.to_thread(self._store.load, chat_id)

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
        edgespec.forget("replies")
        edgespec.forget("kept")
    except EdgespecError as error:
        raise ChatFileError(f"the chat is deleted, but {error.what}", error.next_step) from error
