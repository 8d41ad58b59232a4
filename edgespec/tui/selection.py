"""Actions bound to `MESSAGE_KEYS`, which act on the selected message.

A message is selected while its widget has focus.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TypeAlias

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree
from edgespec.errors import OptionError
from edgespec.tui.desktop import copy_text, show_message
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry
from edgespec.tui.saved_chats import open_new
from edgespec.tui.texts import sentences
from edgespec.tui.turns import TurnScreen

_Run: TypeAlias = Callable[[TurnScreen, int], Awaitable[None]]


async def select(screen: TurnScreen, step: int) -> None:
    """Move the selection by `step` messages. If the input has focus, select the last message.

    Moving down from the last message returns focus to the input.
    """
    selected = screen.selected
    await screen.uncover()
    message = await screen.transcript.neighbour(selected, step)
    if message is None and selected is None:
        # An empty chat has no messages to select, so let Shift+Tab move the focus as in other programs.
        screen.focus_previous()
        return
    screen.transcript.release_anchor()
    screen.set_focus(message or screen.prompt, scroll_visible=False)
    if message is not None:
        screen.transcript.show_message(message)


def _when_free(action: _Run) -> _Run:
    """Make an action wait until the running reply has been stopped."""

    @wraps(action)
    async def run(screen: TurnScreen, place: int) -> None:
        await screen.when_free(partial(action, screen, place))

    return run


@_when_free
async def edit(screen: TurnScreen, place: int) -> None:
    """Copy a message into the input for editing. Sending the text adds a new version of the message."""
    screen.begin_edit(place)


async def finish_edit(screen: TurnScreen, place: int, message: Message) -> None:
    """Add a new version of the message at `place`. If the user wrote the message, generate a reply to it."""
    chat = screen.current_chat
    role = chat.tree.messages[place].role
    if role == "user":
        await screen.take_turn(chat.edit(place, message))
        return
    changed = Message(role, message.content)
    if role == "tool":
        changed = replace(chat.tree.messages[place].message, content=message.content, ended_early="")
    tree = chat.tree.add(ChatEntry(changed), chat.tree.parents[place])
    await _show(screen, tree, len(tree.path) - 1)


@_when_free
async def rerun(screen: TurnScreen, place: int) -> None:
    """Generate another version of a reply, or another reply to a user's message."""
    screen.prompt.focus()
    await screen.take_turn(screen.current_chat.regenerate(place))


@_when_free
async def go_on(screen: TurnScreen, place: int) -> None:
    """Continue a reply from where it ended, or reply to a message."""
    screen.prompt.focus()
    await screen.take_turn(screen.current_chat.continue_reply(place))


async def copy(screen: TurnScreen, place: int) -> None:
    """Copy the text of a message."""
    text = screen.current_chat.tree.messages[place].content.strip()
    screen.say(await copy_text(screen.app, text, "message"))


async def copy_code(screen: TurnScreen, place: int) -> None:
    """Copy the last code block of a message. Each further key press copies the preceding block."""
    entry = screen.current_chat.tree.messages[place]
    screen.say(await screen.code_copier.copy_next(screen.app, entry))


async def open_in_editor(screen: TurnScreen, place: int) -> None:
    """Open a message in the user's text editor for reading."""
    try:
        show_message(screen.app, screen.current_chat.tree.messages[place].message)
    except OptionError as error:
        screen.say(sentences(error.what, error.next_step))


async def fork(screen: TurnScreen, place: int) -> None:
    """Start a new chat with the messages up to and including this one."""
    old = screen.current_chat
    new = old.forked(place)
    await open_new(screen, new, old.fork_text(new))


@_when_free
async def delete(screen: TurnScreen, place: int) -> None:
    """Delete a message and the messages after it. `undo` restores them."""
    chat = screen.current_chat
    path = chat.tree.path
    if place not in path:
        # The reply was being continued, which has replaced it with another version.
        return
    number = len(path) - path.index(place)
    await _show(screen, chat.tree.without(place), path.index(place))
    undo_keys = "Type /undo" if screen.prompt.has_focus else "Press u or type /undo"
    screen.say(f"Deleted {count(number, 'message')}. {undo_keys} to undo.")


async def undo(screen: TurnScreen) -> None:
    """Restore the most recently deleted messages of this chat."""
    await screen.when_free(partial(_undo, screen))


async def _undo(screen: TurnScreen) -> None:
    tree = screen.current_chat.tree
    if not tree.deleted:
        screen.say("There is nothing to restore.")
        return
    tree, place = tree.restored(), tree.deleted[-1]
    await _show(screen, tree, tree.path.index(place))


@_when_free
async def _older_version(screen: TurnScreen, place: int) -> None:
    await _switch(screen, place, -1)


@_when_free
async def _newer_version(screen: TurnScreen, place: int) -> None:
    await _switch(screen, place, 1)


async def _switch(screen: TurnScreen, place: int, step: int) -> None:
    """Show another version of a message, and the messages that follow that version."""
    tree = screen.current_chat.tree
    if place not in tree.path:
        return
    versions = tree.versions(place)
    number = versions.index(place) + step
    if 0 <= number < len(versions):
        await _show(screen, tree.opened(versions[number]), tree.path.index(place))


async def _show(screen: TurnScreen, tree: MessageTree[ChatEntry], index: int) -> None:
    """Save a changed tree and redraw the chat from the `index`-th message, which stays selected.

    If all messages are deleted, the empty transcript gets the focus, so that `u` can still restore them.
    """
    selecting = screen.selected is not None or screen.transcript.has_focus
    screen.current_chat.change_messages(tree)
    await screen.transcript.show_from(index)
    message = screen.transcript.message_at(min(index, len(tree.path) - 1)) if selecting else None
    screen.set_focus(message or (screen.transcript if selecting else screen.prompt))
    if not tree.path:
        # Remove notes that no longer apply, such as “This is a new chat with 1 message”.
        await screen.transcript.remove_notes()
    screen.open_in_model(screen.current_chat)
    await screen.save()


ACTIONS: dict[str, _Run] = {
    "edit": edit,
    "rerun": rerun,
    "go_on": go_on,
    "copy": copy,
    "delete": delete,
    "fork": fork,
    "copy_code": copy_code,
    "open_in_editor": open_in_editor,
    "undo": lambda screen, _: undo(screen),
    "older_version": _older_version,
    "newer_version": _newer_version,
}
"""Functions for the actions in `MESSAGE_KEYS`. Each takes the message's index in the chat's `MessageTree`."""


async def run(screen: TurnScreen, action: str) -> None:
    """Apply an action to the selected message, if there is one."""
    message = screen.selected
    # A reply has no index until it has been generated completely, so it cannot be edited yet.
    if message is not None and message.place is not None:
        await ACTIONS[action](screen, message.place)
