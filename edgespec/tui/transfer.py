"""The commands `/export` and `/import`."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.chat.exporting import FORMATS
from edgespec.chat.importing import read_export
from edgespec.errors import ChatFileError, OptionError
from edgespec.files import error_reason
from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["export_chat", "import_chats"]


async def export_chat(screen: ChatScreen, argument: str) -> None:
    """Write the open chat to a file. The file extension selects the format: `.md`, `.json` or `.html`.

    Raises:
        OptionError: The chat is empty, the format is unknown, or the file exists or cannot be written.
    """
    chat = screen.current_chat
    if not chat.entries:
        raise OptionError("There is nothing to export: the chat is empty", "Send a message first")
    name = re.sub(r"[^\w -]", "", chat.shown_title).strip() or "chat"
    path = Path(os.path.expanduser(argument or f"{name}.md"))
    export = FORMATS.get(path.suffix.lower())
    if export is None:
        raise OptionError(
            f"Unknown format of {path.name!r}", f"End the file name with {', '.join(FORMATS)}, as in chat.md"
        )
    text = export(chat.saved(screen.runtime.target.name)).encode("utf-8", "replace")
    try:
        await asyncio.to_thread(_write_new, path, text)
    except FileExistsError:
        raise OptionError(f"The file {path} exists already", "Type /export with another file name") from None
    except (OSError, ValueError) as error:
        # Names with null characters raise ValueError.
        raise OptionError(f"Cannot write {path}: {error_reason(error)}", "Choose another file") from None
    await screen.transcript.note(f"Exported this chat to {path.resolve()}.")


def _write_new(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)


async def import_chats(screen: ChatScreen, argument: str) -> None:
    """Save the chats in an exported file as new chats, and tell the user what could not be imported."""
    if not argument:
        raise OptionError(
            "Type /import and the path of a file",
            "It reads the chats that ChatGPT, Claude, Open WebUI or edgespec exported, as JSON or ZIP",
        )
    try:
        imported = await asyncio.to_thread(read_export, Path(os.path.expanduser(argument)))
        await screen.archive.add(imported.chats)
    except ChatFileError as error:
        await screen.show_error(error)
        return
    await screen.refresh_sidebar()
    text = f"Imported {count(len(imported.chats), 'chat')}. Press F2 for the list of chats."
    if left_out := +imported.left_out:
        text += " Not imported: " + "; ".join(f"{number} × {what}" for what, number in left_out.items()) + "."
    await screen.transcript.note(text)
