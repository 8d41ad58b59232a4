"""Open saved and new chats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import ChatFileError
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import accepted
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.chat.store import StoredChat
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["offer_unfinished", "open_chat", "open_new", "resume"]


async def open_new(screen: ChatScreen, chat: OpenChat, note: str = "") -> None:
    """Open a new chat once the running reply has stopped. If it has messages, save it and show a note."""

    async def begin() -> None:
        await screen.show_chat(chat)
        if chat.entries:
            await screen.save()
            await screen.transcript.note(note)

    await screen.when_free(begin)


async def open_chat(screen: ChatScreen, chat: StoredChat) -> None:
    """Open a saved chat once the running reply has stopped. Show an error if its file is damaged."""

    async def begin() -> None:
        try:
            saved = await screen.archive.load(chat.id)
        except ChatFileError as error:
            await screen.show_error(error)
            return
        settings, problems = accepted(saved.sampling)
        await screen.show_chat(OpenChat.opened(saved, settings))
        note, target = screen.transcript.note, screen.runtime.target.name
        if saved.messages and saved.messages[-1].role == "user":
            await note("Your last message has no reply yet. Type /continue to get one.")
        elif saved.unfinished:
            await note("The last reply is unfinished. Type /continue to finish it.")
        for problem in problems:
            await note(sentences("One setting in this chat was ignored", problem))
        if (other := saved.target) and other != target:
            await note(f"This chat used {other}, and now uses {target}. Type /model to switch.")

    await screen.when_free(begin)


async def resume(screen: ChatScreen, wanted: str) -> None:
    """Open the chat with this ID or title. `last` means the newest chat. Show a note if there is none."""
    try:
        found = await screen.archive.find(wanted)
    except ChatFileError as error:
        await screen.show_error(error)
        return
    if found is not None:
        await open_chat(screen, found)
        return
    missing = "there are no saved chats yet" if wanted == "last" else f"no saved chat {wanted!r}"
    await screen.transcript.note(
        f"There is {missing}, so this is a new chat. Press F2 for the list of chats."
    )


async def offer_unfinished(screen: ChatScreen) -> None:
    """If the newest saved chat has an unfinished reply, tell the user how to continue it."""
    try:
        newest = await screen.archive.find("last")
    except ChatFileError as error:
        await screen.show_error(error)
        return
    if newest is not None and newest.unfinished:
        await screen.transcript.note(
            f"Your last chat, “{newest.title}”, has an unfinished reply. Type /continue to finish it."
        )
