"""The commands `/export` and `/import`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.chat.exporting import write_export
from edgespec.chat.importing import ExportedChats
from edgespec.chat.saved_chat import SavedChat
from edgespec.errors import ChatFileError, OptionError
from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen
    from edgespec.tui.open_chat import OpenChat

__all__ = ["chat_to_export", "export_chat", "file_to_import", "import_chats", "imported_text"]


async def export_chat(screen: ChatScreen, argument: str) -> None:
    """Write the open chat to a file. The file extension selects the format: `.md`, `.json` or `.html`.

    Raises:
        OptionError: The chat is empty, the format is unknown, or the file exists or cannot be written.
    """
    chat = chat_to_export(screen.current_chat, screen.runtime.target.name)
    path = await asyncio.to_thread(write_export, chat, argument)
    await screen.transcript.note(f"Exported this chat to {path}.")


def chat_to_export(chat: OpenChat, target: str) -> SavedChat:
    """Return the open chat with its title. Raises OptionError if it is empty."""
    if not chat.entries:
        raise OptionError("there is nothing to export: the chat is empty", "send a message first")
    return chat.saved(target)


async def import_chats(screen: ChatScreen, argument: str) -> None:
    """Save the chats in an exported file as new chats, and tell the user what could not be imported."""
    chats = ExportedChats(file_to_import(argument))
    try:
        await screen.archive.add(chats)
    except ChatFileError as error:
        await screen.show_error(error)
    await screen.refresh_sidebar()
    if chats.read_count:
        await screen.transcript.note(imported_text(chats, "Press F2 for the list of chats."))


def file_to_import(argument: str) -> Path:
    """Return the path that follows `/import`. Raises OptionError if it is missing."""
    if not argument:
        raise OptionError(
            "/import needs the path of a file",
            "type /import and the path of a JSON or ZIP file exported from ChatGPT, Claude, Open WebUI or"
            " edgespec",
        )
    return Path(os.path.expanduser(argument))


def imported_text(chats: ExportedChats, hint: str) -> str:
    """Return a note that says how many chats were imported, and what was left out."""
    text = f"Imported {count(chats.read_count, 'chat')} from {chats.path.name}. {hint}"
    if left_out := +chats.left_out:
        text += (
            " Not imported: " + "; ".join(f"{what} ({number:,})" for what, number in left_out.items()) + "."
        )
    return text
