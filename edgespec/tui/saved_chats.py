"""Open, rename, pin and delete chats. A deletion can be undone for a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from edgespec.chat.store import StoredChat
from edgespec.errors import ChatFileError
from edgespec.tui.archive import UNDO_SECONDS
from edgespec.tui.commands.chats import MAX_TITLE
from edgespec.tui.model_choice import models_here, options_to_open
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.screens.dialogs import RenameScreen
from edgespec.tui.settings import accepted, remove_unsupported_method
from edgespec.tui.texts import missing_models_text, not_found_text, sentences
from edgespec.tui.turns import TurnScreen


async def open_new(screen: TurnScreen, chat: OpenChat, note: str = "") -> None:
    """Open a new chat once the running reply has stopped. If it has messages, save it and show `note`."""

    async def begin() -> None:
        await screen.show_chat(chat)
        if chat.entries:
            await screen.save()
            await screen.transcript.note(note)

    await screen.when_free(begin)


async def open_chat(
    screen: TurnScreen,
    chat: StoredChat,
    *,
    switches: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Open a saved chat once the running reply has stopped, and load its own model if another one is loaded.

    If the chat is open already, and no other program has changed it, only the input gets the focus. Shows an
    error if the chat's file is damaged.

    Args:
        screen: The chat screen.
        chat: The saved chat.
        switches: Whether to load the chat's own model.
        overrides: Settings, or the system prompt, that replace those of the chat.
    """

    async def begin() -> None:
        # If the last save failed, the file lacks the last messages.
        unsaved = screen.archive.unsaved_chat(chat.id)
        try:
            saved = await asyncio.to_thread(screen.archive.load, chat.id)
        except ChatFileError as error:
            await screen.show_error(error)
            return
        settings, problems = accepted(saved.sampling)
        opened = unsaved or OpenChat.opened(saved, settings)
        opened.override(overrides or {})
        await screen.show_chat(opened)
        target, notes = screen.runtime.target.name, []
        if opened.messages and opened.messages[-1].role == "user":
            notes.append("Your last message has no reply yet. Type /continue to get one.")
        elif opened.unfinished:
            notes.append("The last reply is unfinished. Type /continue to finish it.")
        notes += [sentences("One setting in this chat was ignored", problem) for problem in problems]
        # If the user has chosen another chat meanwhile, this chat's model is not needed.
        is_switching = switches and not screen.after_reply
        here = await asyncio.to_thread(models_here, saved.models) if is_switching else None
        if missing := missing_models_text(saved, target, here):
            notes.append(missing)
        options, is_other = None, saved.target != target
        if here is not None:
            changed = screen.changed_load_options
            options = options_to_open(here, screen.models, changed, is_other=is_other)
        if here is not None and options is not None:
            # Loading a model shows the chat again, so show the notes afterwards.
            # The chat has its own load options, so those of the loaded model do not apply to it.
            screen.load_model(here.target, options, note=" ".join(notes))
            return
        # A model that is loaded for the chat removes the setting itself.
        if why_removed := remove_unsupported_method(screen.runtime, opened.settings):
            notes.append(sentences(*why_removed))
        for note in notes:
            await screen.transcript.note(note)

    current = screen.current_chat
    if chat.id == current.id and current.saved_at is not None and chat.updated <= current.saved_at:
        screen.prompt.focus()
        return
    await screen.when_free(begin)


async def resume(screen: TurnScreen, wanted: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Open the chat with this ID or title. `last` means the newest chat. Show a note if none is found.

    Args:
        screen: The chat screen.
        wanted: The ID or title.
        overrides: Settings, or the system prompt, that replace those of the chat.
    """
    try:
        found = await asyncio.to_thread(screen.archive.find, wanted)
    except ChatFileError as error:
        await screen.show_error(error)
        return
    if found is not None:
        # The command line has already chosen the models.
        await open_chat(screen, found, switches=False, overrides=overrides)
        return
    await screen.transcript.note(f"{not_found_text(wanted)}. Press F2 for the list of chats.")


async def offer_unfinished(screen: TurnScreen) -> None:
    """If the newest saved chat has an unfinished reply, tell the user how to continue it."""
    try:
        newest = await asyncio.to_thread(screen.archive.find, "last")
    except ChatFileError as error:
        await screen.show_error(error)
        return
    if newest is not None and newest.unfinished:
        await screen.transcript.note(
            f"Your last chat, “{newest.title}”, has an unfinished reply. Type /continue to finish it."
        )


async def rename_chat(screen: TurnScreen, chat: StoredChat) -> None:
    """Prompt for a new title, and rename the chat."""
    typed = await screen.app.push_screen_wait(RenameScreen(chat.title))
    title = " ".join((typed or "").split())[:MAX_TITLE]
    if title and title != chat.title:
        await _change(screen, chat, title=title)


async def pin_chat(screen: TurnScreen, chat: StoredChat) -> None:
    """Pin the chat to the top of the list, or unpin it."""
    if await _change(screen, chat, pinned=not chat.pinned):
        screen.say(f"{'Unpinned' if chat.pinned else 'Pinned'} “{chat.title}”.")


async def _change(
    screen: TurnScreen, chat: StoredChat, *, title: str | None = None, pinned: bool | None = None
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
        await asyncio.to_thread(screen.archive.change, chat.id, title=title, pinned=pinned)
    except ChatFileError as error:
        await screen.show_error(error)
        return False
    finally:
        await screen.refresh_sidebar()
    return True


async def delete_chat(screen: TurnScreen, chat: StoredChat) -> None:
    """Remove a chat from the list. It is permanently deleted after a minute, or when edgespec quits.

    Cached data that may contain the chat's text is deleted at the same time.
    """

    async def begin() -> None:
        try:
            await asyncio.to_thread(screen.archive.hide, chat.id)
        except ChatFileError as error:
            await screen.show_error(error)
            return
        if chat.id == screen.current_chat.id:
            await screen.show_chat(OpenChat(screen.first_system, dict(screen.first_settings)))
        await screen.refresh_sidebar()
        screen.sidebar.focus()
        screen.say(
            f"Deleted “{chat.title}”. Press Ctrl+_ or type /undo within {UNDO_SECONDS:.0f} seconds to restore"
            " it."
        )
        if (earlier := screen.deletion_timers.pop(chat.id, None)) is not None:
            # The chat was deleted before and restored, so its time starts again.
            earlier.stop()
        screen.deletion_timers[chat.id] = screen.set_timer(UNDO_SECONDS, finish)

    async def finish() -> None:
        try:
            await asyncio.to_thread(screen.archive.finish_deletion, chat.id)
        except ChatFileError as error:
            await screen.show_error(error)

    # Stop a running reply first. Otherwise, the chat would be saved again when the reply ends.
    if chat.id == screen.current_chat.id:
        await screen.when_free(begin)
    else:
        await begin()


async def restore_chat(screen: TurnScreen) -> None:
    """Restore and open the most recently deleted chat, if there is one."""
    try:
        stored = await asyncio.to_thread(screen.archive.restore)
    except ChatFileError as error:
        await screen.show_error(error)
    else:
        if stored is not None:
            await open_chat(screen, stored)


async def restore_in_list(screen: TurnScreen) -> None:
    """Put the most recently deleted chat back into the list, without opening it."""
    try:
        stored = await asyncio.to_thread(screen.archive.restore)
    except ChatFileError as error:
        await screen.show_error(error)
        return
    await screen.refresh_sidebar()
    if stored is not None:
        screen.sidebar.highlight(stored.id)
    screen.app.clear_notifications()
    screen.say("There is no deleted chat to restore." if stored is None else f"Restored “{stored.title}”.")
