"""Actions that a key triggers on the selected message. A message is selected while its widget has focus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from edgespec.chat.message import Message
from edgespec.chat.message_tree import MessageTree
from edgespec.errors import OptionError
from edgespec.tui.copying import copy_text
from edgespec.tui.editor import show_message
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry
from edgespec.tui.saved_chats import open_new
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["ACTIONS", "MessageAction", "delete", "finish_edit", "fork", "hint", "run", "select", "undo"]

_Run: TypeAlias = Callable[["ChatScreen", int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class MessageAction:
    """An action on the selected message, and the key that triggers it.

    Attributes:
        key: Textual's name of the key.
        label: The key and the action in the hint line. Empty if the hint line does not show them.
        help: Description on the help page.
        run: Function that performs the action. Takes the message's index in the chat's `MessageTree`.
    """

    key: str
    label: str
    help: str
    run: _Run


async def select(screen: ChatScreen, step: int) -> None:
    """Move the selection by `step` messages. If the input has focus, select the last message.

    Moving down from the last message returns focus to the input.
    """
    selected = screen.selected
    await screen.uncover()
    message = await screen.transcript.neighbour(selected, step)
    if message is None and selected is None:
        # An empty chat has no messages to select, so Shift+Tab moves focus as in other programs.
        screen.focus_previous()
        return
    screen.transcript.release_anchor()
    screen.set_focus(message or screen.prompt, scroll_visible=False)
    if message is not None:
        screen.transcript.show_message(message)


async def edit(screen: ChatScreen, place: int) -> None:
    """Copy a message into the input for editing. Sending the text adds a version of the message."""

    async def begin() -> None:
        screen.begin_edit(place)

    await screen.when_free(begin)


async def finish_edit(screen: ChatScreen, place: int, message: Message) -> None:
    """Add a version of the message at `place`. If the user wrote the message, generate a reply to it."""
    chat = screen.current_chat
    role = chat.tree.messages[place].role
    if role == "user":
        await screen.take_turn(chat.edit(place, message))
        return
    changed = Message(role, message.content)
    if role == "tool":
        changed = replace(chat.tree.messages[place].message, content=message.content)
    tree = chat.tree.add(ChatEntry(changed), chat.tree.parents[place])
    await _show(screen, tree, len(tree.path) - 1)


async def rerun(screen: ChatScreen, place: int) -> None:
    """Generate another version of a reply, or another reply to a user's message."""

    async def begin() -> None:
        screen.prompt.focus()
        await screen.take_turn(screen.current_chat.regenerate(place))

    await screen.when_free(begin)


async def go_on(screen: ChatScreen, place: int) -> None:
    """Continue a reply from its end, or reply to a message."""

    async def begin() -> None:
        screen.prompt.focus()
        await screen.take_turn(screen.current_chat.continue_reply(place))

    await screen.when_free(begin)


async def copy(screen: ChatScreen, place: int) -> None:
    """Copy the text of a message."""
    await copy_text(screen, screen.current_chat.tree.messages[place].content.strip(), "message")


async def copy_code(screen: ChatScreen, place: int) -> None:
    """Copy the last code block of a message. Each further key press copies the preceding block."""
    await screen.code_copier.copy_next(screen, screen.current_chat.tree.messages[place])


async def open_in_editor(screen: ChatScreen, place: int) -> None:
    """Open a message in the user's text editor for reading."""
    try:
        show_message(screen, screen.current_chat.tree.messages[place].message)
    except OptionError as error:
        screen.say(sentences(error.what, error.next_step))


async def fork(screen: ChatScreen, place: int) -> None:
    """Start a new chat with the messages up to and including this one."""
    old = screen.current_chat
    new = old.forked(place)
    await open_new(screen, new, old.fork_text(new))


async def delete(screen: ChatScreen, place: int) -> None:
    """Delete a message and the messages after it. `undo` restores them."""

    async def begin() -> None:
        chat = screen.current_chat
        path = chat.tree.path
        number = len(path) - path.index(place)
        await _show(screen, chat.tree.without(place), path.index(place))
        undo_keys = "Type /undo" if screen.prompt.has_focus else "Press u or type /undo"
        screen.say(f"Deleted {count(number, 'message')}. {undo_keys} to undo.")

    await screen.when_free(begin)


async def undo(screen: ChatScreen, _place: int | None = None) -> None:
    """Restore the most recently deleted messages of this chat."""

    async def begin() -> None:
        tree = screen.current_chat.tree
        if not tree.deleted:
            screen.say("There is nothing to undo.")
            return
        tree, place = tree.restored(), tree.deleted[-1]
        await _show(screen, tree, tree.path.index(place))

    await screen.when_free(begin)


async def _older_version(screen: ChatScreen, place: int) -> None:
    await _switch(screen, place, -1)


async def _newer_version(screen: ChatScreen, place: int) -> None:
    await _switch(screen, place, 1)


async def _switch(screen: ChatScreen, place: int, step: int) -> None:
    """Show another version of a message, and the messages after that version."""

    async def begin() -> None:
        tree = screen.current_chat.tree
        versions = tree.versions(place)
        number = versions.index(place) + step
        if 0 <= number < len(versions):
            await _show(screen, tree.opened(versions[number]), tree.path.index(place))

    await screen.when_free(begin)


async def _show(screen: ChatScreen, tree: MessageTree[ChatEntry], index: int) -> None:
    """Save a changed tree and redraw the chat from the `index`-th message, which stays selected.

    If all messages are deleted, the empty transcript has the focus, so that `u` still restores them.
    """
    selecting = screen.selected is not None or screen.transcript.has_focus
    screen.current_chat.change_messages(tree)
    await screen.transcript.show_from(index)
    message = screen.transcript.message_at(min(index, len(tree.path) - 1)) if selecting else None
    screen.set_focus(message or (screen.transcript if selecting else screen.prompt))
    if not tree.path:
        # Remove notes that no longer apply, such as "This is a new chat with 1 message".
        await screen.transcript.remove_notes()
    screen.open_in_model(screen.current_chat)
    await screen.save()


ACTIONS = (
    MessageAction("e", "e edit", "edit it; Enter saves a new version", edit),
    MessageAction("r", "r re-run", "generate another reply", rerun),
    MessageAction("g", "g go on", "continue the reply from where it stopped", go_on),
    MessageAction("c", "c copy", "copy it", copy),
    MessageAction("d", "d delete", "delete it and the messages after it", delete),
    MessageAction("f", "f fork", "start a new chat with the messages up to this one", fork),
    MessageAction("b", "b copy code", "copy its last code block; press again for the one before", copy_code),
    MessageAction("o", "o open in editor", "read it in your text editor", open_in_editor),
    MessageAction("u", "", "restore the messages that were deleted last", undo),
    MessageAction("left", "", "show the previous version", _older_version),
    MessageAction("right", "", "show the next version", _newer_version),
)
_BY_KEY = {action.key: action for action in ACTIONS}


async def run(screen: ChatScreen, key: str) -> None:
    """Apply the action that is bound to a key to the selected message, if there is one."""
    message = screen.selected
    # A reply has no index until it has been generated completely, so it cannot be edited yet.
    if message is not None and message.place is not None:
        await _BY_KEY[key].run(screen, message.place)


def hint(width: int, *, versions: bool, fold: str) -> str:
    """Return the hint line for a selected message: as many keys as fit. F1 lists the others.

    Args:
        width: Maximum width of the hint in cells.
        versions: Whether the message has other versions.
        fold: What Enter does. Empty if the message contains neither reasoning nor a tool call.
    """
    first = [*(["←→ version"] if versions else []), *([fold] if fold else [])]
    keys = [*first, *(action.label for action in ACTIONS if action.label)]
    for number in range(len(keys), 0, -1):
        more = ["F1 more"] if number < len(keys) else []
        text = " · ".join((*keys[:number], *more, "Esc back"))
        if len(text) <= width:
            return text
    return "Esc back"
