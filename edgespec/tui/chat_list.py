"""Rename, pin and delete chats in the list of chats. For a minute, a deletion can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import ChatFileError
from edgespec.tui.archive import UNDO_SECONDS
from edgespec.tui.commands.chats import MAX_TITLE
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.saved_chats import open_chat
from edgespec.tui.screens.dialogs import RenameScreen

if TYPE_CHECKING:
    from edgespec.chat.store import StoredChat
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["delete_chat", "pin_chat", "rename_chat", "restore_chat", "restore_in_list"]


async def rename_chat(screen: ChatScreen, chat: StoredChat) -> None:
    """Ask for a new title, and rename the chat."""
    typed = await screen.app.push_screen_wait(RenameScreen(chat.title))
    title = " ".join((typed or "").split())[:MAX_TITLE]
    if title and title != chat.title:
        await _change(screen, chat, title=title)


async def pin_chat(screen: ChatScreen, chat: StoredChat) -> None:
    """Pin the chat to the top of the list, or unpin it."""
    if await _change(screen, chat, pinned=not chat.pinned):
        screen.say(f"{'Unpinned' if chat.pinned else 'Pinned'} “{chat.title}”.")


async def _change(
    screen: ChatScreen, chat: StoredChat, *, title: str | None = None, pinned: bool | None = None
) -> bool:
    """Change a chat. If it cannot be saved, show the error and return False."""
    current = screen.current_chat
    if chat.id == current.id:
        current.title = current.title if title is None else title
        current.pinned = current.pinned if pinned is None else pinned
        saved = await screen.save(show_again=True)
        screen.refresh_facts()
        return saved
    try:
        await screen.archive.change(chat.id, title=title, pinned=pinned)
    except ChatFileError as error:
        await screen.show_error(error)
        return False
    finally:
        await screen.refresh_sidebar()
    return True


async def delete_chat(screen: ChatScreen, chat: StoredChat) -> None:
    """Remove a chat from the list. It is permanently deleted after a minute, or when edgespec quits.

    Cached data that may contain the chat's text is deleted at the same time.
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
        screen.say(
            f"Deleted “{chat.title}”. Press Ctrl+Z or type /undo within {UNDO_SECONDS:.0f} seconds to restore"
            " it."
        )
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


async def restore_chat(screen: ChatScreen) -> None:
    """Restore and open the most recently deleted chat, if there is one."""
    try:
        stored = await screen.archive.restore()
    except ChatFileError as error:
        await screen.show_error(error)
    else:
        if stored is not None:
            await open_chat(screen, stored)


async def restore_in_list(screen: ChatScreen) -> None:
    """Put the most recently deleted chat back into the list, without opening it."""
    try:
        stored = await screen.archive.restore()
    except ChatFileError as error:
        await screen.show_error(error)
        return
    await screen.refresh_sidebar()
    if stored is not None:
        screen.sidebar.highlight(stored.id)
    screen.app.clear_notifications()
    screen.say("There is no deleted chat to restore." if stored is None else f"Restored “{stored.title}”.")
