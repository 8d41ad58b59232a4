"""Commands that act on chats, and on the messages of the open chat."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.chat.exporting import messages_as_markdown, write_export
from edgespec.chat.importing import ExportedChats
from edgespec.chat.store import FoundChat, closest_chats, find_chat, search
from edgespec.errors import ChatFileError, OptionError
from edgespec.tui.commands.results import (
    Action,
    Change,
    Command,
    Context,
    Copy,
    Generate,
    Nothing,
    Open,
    Problem,
    Result,
    Text,
)
from edgespec.tui.input_syntax import unquoted
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import OpenChat, code_blocks
from edgespec.tui.tool_access import unanswered_calls

if TYPE_CHECKING:
    from edgespec.chat.tool_calls.calls import ToolCall
    from edgespec.tui.archive import Archive
    from edgespec.tui.open_chat import RunningTurn

MAX_TITLE = 80
"""Maximum number of characters in a chat title given by the user."""

# Maximum number of chats that /load and /search list in the plain chat.
_LISTED_CHATS = 20
# Maximum number of characters to show of a line found by /search.
_MAX_LINE = 80


def _new(context: Context) -> Result:
    return Open(context.new_chat)


def _load(context: Context) -> Result:
    if not context.argument:
        return Action(
            "chats", otherwise=lambda: _listed(context.archive, "", "There are no saved chats yet.")
        )
    title = unquoted(context.argument)
    chats = context.archive.list()
    found = find_chat(chats, title)
    if found is None:
        close = [f"“{chat.title}”" for chat in closest_chats(chats, title)]
        suggestion = f"Did you mean {' or '.join(close)}? " if close else ""
        raise OptionError(
            f"No saved chat has {title!r} in its title",
            f"{suggestion}{context.list_hint}. To change the model, type /model",
            code="chat_not_found",
        )
    return Open(found)


def _search(context: Context) -> Result:
    query = unquoted(context.argument)
    nothing = f"No chat contains “{context.argument}”."
    return Action("chats", query, otherwise=lambda: _listed(context.archive, query, nothing))


def _listed(archive: Archive, query: str, nothing: str) -> Result:
    """List the chats that match a query, or show the hint `nothing` if there are none."""
    found = search(archive.list(), query)
    hints = []
    if len(found) > _LISTED_CHATS:
        hints.append(f"{len(found) - _LISTED_CHATS:,} more chats. Type /search and a word to find them.")
    hints.append("To open one, type /load and its title." if found else nothing)
    return Text(_lines(found[:_LISTED_CHATS])), Text("\n".join(hints), is_hint=True)


def _lines(found: Sequence[FoundChat]) -> str:
    now, lines = datetime.now(UTC), []
    for stored, line in found:
        about = f"{ago(stored.updated, now)}, {count(stored.message_count, 'message')}"
        if stored.problem:
            about = "unreadable"
        pinned = "pinned, " if stored.pinned else ""
        lines.append(f"{stored.title} ({pinned}{about})" + (f": {line[:_MAX_LINE]}" if line else ""))
    return "\n".join(lines)


def _export(context: Context) -> Result:
    """Write the open chat to a file. The file extension selects the format: `.md`, `.json` or `.html`."""
    if not context.chat.messages_so_far:
        raise OptionError(
            "there is nothing to export: the chat is empty",
            "send a message first",
            code="command_unavailable",
        )
    path = write_export(context.chat.saved(context.runtime.target.name), unquoted(context.argument))
    return Text(f"Exported this chat to {path}.")


def _import(context: Context) -> Result:
    if not context.argument:
        raise OptionError(
            "/import needs the path of a file",
            "type /import followed by the path of a JSON or ZIP file exported from ChatGPT, Claude, Open"
            " WebUI or edgespec",
        )
    path, hint = unquoted(context.argument), f"{context.list_hint}."
    return Action("import", path, otherwise=lambda: import_file(context.archive, path, hint))


def import_file(archive: Archive, path: str, hint: str) -> Result:
    """Import the chats in an exported file as new chats, and report what could not be imported.

    Blocks until all of them are saved, which can take minutes.

    Args:
        archive: The saved chats.
        path: The exported file.
        hint: How to open the list of chats, as a sentence.
    """
    chats = ExportedChats(Path(os.path.expanduser(path)))
    failure: tuple[Problem, ...] = ()
    try:
        archive.add(chats)
    except ChatFileError as error:
        failure = (Problem(error),)
    text = imported_text(chats, hint) if chats.read_count or not failure else ""
    return *failure, Action("list_changed"), Text(text)


def imported_text(chats: ExportedChats, hint: str) -> str:
    """Return a note on how many chats were imported and what was left out."""
    text = f"Imported {count(chats.read_count, 'chat')} from {chats.path.name}. {hint}"
    if left_out := +chats.left_out:
        text += (
            " Not imported: " + "; ".join(f"{what} ({number:,})" for what, number in left_out.items()) + "."
        )
    return text


def _quit(_context: Context) -> Result:
    return Action("quit")


def _clear(context: Context) -> Result:
    return Open(OpenChat(context.chat.system, dict(context.chat.settings)))


def _rename(context: Context) -> Result:
    if not context.chat.entries and not context.writing:
        return Nothing("There is nothing to save: the chat is empty", "Send a message first")
    change = renamed(context.chat, unquoted(context.argument))
    if context.argument or not context.chat.entries:
        return change
    return Action("rename", otherwise=lambda: change)


def renamed(chat: OpenChat, title: str) -> Change:
    """Return a change that saves a chat and, if `title` is not empty, renames it."""
    title = " ".join(title.split())[:MAX_TITLE] or chat.title
    shown = title or chat.shown_title

    def apply(chat: OpenChat) -> None:
        chat.title = title

    return Change(apply, f"This chat is saved as “{shown}”.", in_plain=f"Saved as {shown!r}.", is_brief=True)


def _pin(context: Context) -> Result:
    if not context.chat.entries:
        return Nothing("There is nothing to pin: the chat is empty", "Send a message first")
    pinned = not context.chat.pinned

    def apply(chat: OpenChat) -> None:
        chat.pinned = pinned

    text = "This chat now stays at the top of the list." if pinned else "Unpinned this chat."
    return Change(apply, text, is_brief=True)


OPENING = (
    Command("new", "", "start a new chat; this one stays saved", _new),
    Command("load", "[title]", "open a saved chat", _load, ("open", "chats", "list"), slow="reads"),
    Command("search", "[text]", "search the titles and messages of all chats", _search, ("find",)),
)
KEEPING = (
    Command("export", "[file]", "write this chat to a file: .md, .json or .html", _export, slow="writes"),
    Command(
        "import",
        "file",
        "add chats exported by ChatGPT, Claude, Open WebUI or edgespec",
        _import,
    ),
    Command("quit", "", "quit; the chat is saved", _quit, ("exit", "bye", "q")),
    Command("clear", "", "start a new chat with the same system prompt and settings", _clear, ("reset",)),
    Command("rename", "[title]", "give this chat another title", _rename, ("save",)),
    Command("pin", "", "pin this chat to the top of the list of chats, or unpin it", _pin),
)


_SEND = "Send a message first"


def _regen(context: Context) -> Result:
    if context.chat.last_place("user") is None and not context.writing:
        return Nothing("There is no reply to regenerate yet", _SEND)
    return Generate(_regenerated, "/regen")


def _regenerated(chat: OpenChat) -> RunningTurn | None:
    place = chat.last_place("user")
    return None if place is None else chat.regenerate(place)


def _continue(context: Context) -> Result:
    """Finish the last reply. If this chat is empty, open the newest unfinished chat first."""
    if context.writing:
        return Nothing("The reply is not finished yet", "Wait until it ends")
    if context.chat.entries:
        return Generate(_continued, "/continue")
    unfinished = next((chat for chat in context.archive.list() if chat.unfinished), None)
    if unfinished is None:
        return Nothing("There is no unfinished reply to continue", "Type /load for the list of chats")
    return Open(unfinished), Generate(_continued, "/continue")


def _continued(chat: OpenChat) -> RunningTurn | Sequence[ToolCall] | None:
    if calls := unanswered_calls(chat):
        return calls
    place = chat.last_place("user", "tool", "assistant")
    return None if place is None else chat.continue_reply(place)


def _edit(_context: Context) -> Result:
    return Action("edit")


def _fork(context: Context) -> Result:
    chat = context.chat
    if chat.tree.tip is None:
        return Nothing("There is nothing to fork: the chat is empty", _SEND)
    fork = chat.forked(chat.tree.tip)
    return Open(fork, chat.fork_text(fork))


def _delete(context: Context) -> Result:
    if context.chat.last_place("user") is None and not context.writing:
        return Nothing("There is no message to delete", _SEND)
    return Action("delete")


def _undo(context: Context) -> Result:
    chat_deleted_at = max(context.archive.hidden.values(), default=0.0)
    messages_deleted_at = max(context.chat.deletion_times, default=0.0)
    if chat_deleted_at > messages_deleted_at:
        return Action("restore_chat")
    if not context.chat.tree.deleted and not context.writing:
        return Nothing("There is nothing to restore", "/undo restores messages that you deleted with /delete")
    return Action("undo")


def _copy(context: Context) -> Result:
    part, _, number = context.argument.lower().partition(" ")
    number, reply = number.strip(), context.chat.last_reply
    if part in ("chat", "all"):
        return Copy(messages_as_markdown(context.chat.messages_so_far), "chat")
    if part in ("", "reply", "last"):
        return Copy(reply.content.strip() if reply is not None else "", "last reply")
    if part not in ("code", "block"):
        raise OptionError(
            f"Unknown argument {context.argument!r} for /copy",
            "Type /copy for the last reply, /copy code for its last code block, or /copy chat for everything",
        )
    blocks = code_blocks(reply.content) if reply is not None else []
    if not number:
        return Action("copy_code", otherwise=lambda: _block(blocks, str(len(blocks))))
    return _block(blocks, number)


def _block(blocks: Sequence[str], number: str) -> Copy:
    """Return the code block with this number, counted from 1. Raises OptionError if there is none."""
    if not blocks:
        raise OptionError(
            "The last reply has no code block", "Type /copy to copy all of it", code="command_unavailable"
        )
    if not (number.isdecimal() and 1 <= int(number) <= len(blocks)):
        raise OptionError(
            f"There is no code block {number}. The last reply has {count(len(blocks), 'code block')}",
            "Type /copy code for the last one, or a number, such as /copy code 1",
            code="command_unavailable",
        )
    which = f"code block ({int(number)} of {len(blocks)})" if len(blocks) > 1 else "code block"
    return Copy(blocks[int(number) - 1].rstrip("\n"), which)


def _editor(context: Context) -> Result:
    if context.chat.last_reply is None:
        return Nothing("There is no reply to open yet", _SEND)
    return Action("read_reply")


MESSAGES = (
    Command(
        "regen", "", "generate another reply to your last message", _regen, ("regenerate", "retry", "again")
    ),
    Command(
        "continue",
        "",
        "finish an interrupted reply in this chat or the previous one",
        _continue,
        slow="reads",
    ),
    Command(
        "edit",
        "",
        "edit and resend your last message",
        _edit,
        instead="Type /delete, then send the edited message",
    ),
    Command("fork", "", "start a new chat with the messages of this one", _fork, ("branch",)),
    Command("delete", "", "delete your last message and the reply to it", _delete),
    Command(
        "undo",
        "",
        "restore the last deleted messages or chat",
        _undo,
        in_plain="restore the last deleted messages",
    ),
    Command(
        "copy",
        "[code [n]|chat]",
        "copy the last reply, a code block from it, or the whole chat",
        _copy,
        in_plain="print the last reply, a code block from it, or the whole chat",
    ),
    Command(
        "editor",
        "",
        "open the last reply in your text editor",
        _editor,
        ("view",),
        instead="Type /copy to print the last reply",
    ),
)
