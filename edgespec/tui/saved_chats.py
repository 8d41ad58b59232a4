"""Save the open chat, open saved chats, and finish their interrupted replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import ChatFileError, OptionError
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import accepted
from edgespec.tui.texts import sentences
from edgespec.tui.tool_access import unanswered_calls

if TYPE_CHECKING:
    from edgespec.chat.store import StoredChat
    from edgespec.tui.chat_screen import ChatScreen

__all__ = [
    "MAX_TITLE",
    "continue_reply",
    "offer_unfinished",
    "open_by_title",
    "open_chat",
    "resume",
    "save_as",
]

MAX_TITLE = 80
"""Maximum length of a title that the user gives to a chat, in characters."""


async def save_as(screen: ChatScreen, title: str) -> None:
    """Save the chat. Rename it if `title` is not empty."""
    chat = screen.current_chat
    if not chat.entries and not screen.writing:
        screen.say("There is nothing to save: the chat is empty.")
        return
    chat.title = " ".join(title.split())[:MAX_TITLE] or chat.title
    if await screen.save(show_again=True):
        screen.refresh_facts()
        screen.say(f"This chat is saved as “{chat.shown_title}”.")


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


async def open_by_title(screen: ChatScreen, title: str) -> None:
    """Open the newest chat whose title contains `title`. Raises OptionError if there is none."""
    if not await _open_found(screen, title):
        raise OptionError(
            f"No saved chat has {title!r} in its title",
            "Press F2 for the list of chats. To change the model, type /model",
        )


async def resume(screen: ChatScreen, wanted: str) -> None:
    """Open the chat with this ID or title. `last` means the newest chat. Show a note if there is none."""
    if not await _open_found(screen, wanted):
        missing = "there are no saved chats yet" if wanted == "last" else f"no saved chat {wanted!r}"
        await screen.transcript.note(
            f"There is {missing}, so this is a new chat. Press F2 for the list of chats."
        )


async def _open_found(screen: ChatScreen, wanted: str) -> bool:
    """Open the chat with this ID or title. Return False if there is none."""
    try:
        found = await screen.archive.find(wanted)
    except ChatFileError as error:
        await screen.show_error(error)
        return True
    if found is not None:
        await open_chat(screen, found)
    return found is not None


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


async def continue_reply(screen: ChatScreen, _argument: str = "") -> None:
    """Finish the last reply. If this chat is empty, open the newest unfinished chat first."""
    if screen.writing:
        screen.say_while_writing("The reply is not finished yet.")
        return
    if not screen.current_chat.entries:
        try:
            unfinished = await screen.archive.find_unfinished()
        except ChatFileError as error:
            await screen.show_error(error)
            return
        if unfinished is None:
            screen.say("There is no unfinished reply to continue.")
            return
        await open_chat(screen, unfinished)
    chat = screen.current_chat
    if (calls := unanswered_calls(chat)) and not screen.writing:
        screen.tool_use.begin(calls)
        return
    place = chat.last_place("user", "tool", "assistant")
    if place is not None and not screen.writing:
        await screen.take_turn(chat.continue_reply(place))
