"""Delete chats from the list. For a minute, the deletion can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import ChatFileError
from edgespec.tui.archive import UNDO_SECONDS
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.saved_chats import open_chat

if TYPE_CHECKING:
    from edgespec.chat.store import StoredChat
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["delete_chat", "restore_chat"]


async def delete_chat(screen: ChatScreen, chat: StoredChat) -> None:
    """Remove a chat from the list. It is permanently deleted after a minute, or when edgespec quits.

    Cached data that may contain its text is deleted at the same time.
    """

    async def begin() -> None:
        try:
            await screen.archive.hide(chat.id)
        except ChatFileError as error:
            await screen.show_error(error)
            return
        if chat.id == screen.current_chat.id:
            await screen.show_chat(OpenChat(screen.first_system, dict(screen.first_settings)))
        await screen.refresh_sidebar()
        screen.sidebar.focus()
        screen.say(f"Deleted “{chat.title}”. Type /undo within {UNDO_SECONDS:.0f} seconds to restore it.")
        screen.set_timer(UNDO_SECONDS, finish)

    async def finish() -> None:
        try:
            await screen.archive.finish_deletion(chat.id)
        except ChatFileError as error:
            await screen.show_error(error)

    # Stop a running reply first. Otherwise, the chat would be saved again when the reply ends.
    if chat.id == screen.current_chat.id:
        await screen.when_free(begin)
    else:
        await begin()


async def restore_chat(screen: ChatScreen) -> bool:
    """Restore and open the most recently deleted chat. Return False if there is none to restore."""
    if not screen.archive.hidden:
        return False
    try:
        stored = await screen.archive.restore()
    except ChatFileError as error:
        await screen.show_error(error)
    else:
        if stored is not None:
            await open_chat(screen, stored)
    return True
