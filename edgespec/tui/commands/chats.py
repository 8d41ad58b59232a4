"""Commands that open, find, name, export and import chats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.chat.exporting import write_export
from edgespec.chat.importing import ExportedChats
from edgespec.chat.store import FoundChat, closest_chats, find_chat, search
from edgespec.errors import ChatFileError, OptionError
from edgespec.tui.commands.results import (
    Action,
    Change,
    Command,
    Context,
    Nothing,
    Open,
    Problem,
    Result,
    Text,
)
from edgespec.tui.input_syntax import unquoted
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import OpenChat

if TYPE_CHECKING:
    from edgespec.tui.archive import Archive

__all__ = ["KEEPING", "MAX_TITLE", "OPENING", "import_file", "imported_text", "renamed"]

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
    chats = context.archive.list_now()
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
    found = search(archive.list_now(), query)
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
        archive.add_now(chats)
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
