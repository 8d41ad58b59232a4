"""The saved chats, reached without making the screen wait for the disk."""

from __future__ import annotations

import asyncio

from edgespec.chat.store import ChatStore, SavedChat, StoredChat
from edgespec.errors import ChatFileError
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
        """Remove one chat, and with it the replies and prompts that later chats would have guessed from.

        Nobody knows any more which of those are of it: all go.
        """
        async with self._lock:
            await asyncio.to_thread(self._store.delete, chat_id)
            await asyncio.to_thread(_forget_replies)


def _forget_replies() -> None:
    from edgespec.texts import forget_replies

    try:
        forget_replies()
    except OSError as error:
        raise ChatFileError(
            f"the chat is deleted, but what was kept for guessing is not: {error.strerror or error}",
            "delete the folder `replies` in edgespec's data folder",
        ) from error
