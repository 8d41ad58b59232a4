"""Send messages together with the files that they refer to, and edited messages as new versions."""

from __future__ import annotations

import asyncio

from edgespec.chat.message import Message
from edgespec.errors import AttachmentError
from edgespec.tui.files.references import find_references, missing_files
from edgespec.tui.selection import finish_edit
from edgespec.tui.texts import sentences
from edgespec.tui.turns import TurnScreen

__all__ = ["send"]

# Seconds after which the user is told that files are still being read.
_NOTICE_SECONDS = 0.5


async def send(screen: TurnScreen, text: str, place: int | None) -> None:
    """Send a message with its files. If `place` is given, send it as a new version of that message.

    If a file cannot be attached, nothing is sent and the text is put back into the input.
    """
    if _is_gone(screen, place):
        screen.say("The message you edited is gone. Press Enter to send your text as a new message.")
        screen.give_back(text)
        return
    is_question = place is None or screen.current_chat.tree.messages[place].role == "user"
    if is_question and (references := find_references(text)):
        # Reading can take seconds, during which the screen must still handle keys.
        screen.run_worker(_send_with_files(screen, text, place, references))
    else:
        await _send_message(screen, Message("user", text.strip()), place)


async def _send_with_files(screen: TurnScreen, text: str, place: int | None, references: list[str]) -> None:
    chat = screen.current_chat
    reading = asyncio.ensure_future(screen.chips.attachments(references))
    if not (await asyncio.wait([reading], timeout=_NOTICE_SECONDS))[0]:
        screen.say("Reading the files…")
    try:
        attachments = await reading
    except AttachmentError as error:
        await screen.transcript.note(sentences(f"The message was not sent: {error.what}", error.next_step))
        screen.give_back_message(text, place)
        return
    if screen.writing or chat is not screen.current_chat or _is_gone(screen, place):
        screen.give_back(text)
        return
    files = tuple(file for attachment in attachments for file in attachment.files)
    await _send_message(screen, Message("user", text.strip(), files=files), place)
    found = {attachment.path for attachment in attachments}
    if missing := [path for path in missing_files(references) if path not in found]:
        names = ", ".join(f"@{path}" for path in missing[:5])
        await screen.transcript.note(f"No file matches {names}, so this was sent as text.")


async def _send_message(screen: TurnScreen, message: Message, place: int | None) -> None:
    """Send a message, or send it as a new version of the message at `place`, and start the reply."""
    await screen.tool_use.answer_pending(screen.current_chat)
    if place is None:
        await screen.take_turn(screen.current_chat.send(message))
    else:
        await finish_edit(screen, place, message)


def _is_gone(screen: TurnScreen, place: int | None) -> bool:
    """Return whether an edited message has been deleted, or belongs to a version that is no longer open."""
    return place is not None and place not in screen.current_chat.tree.path
