"""`edgespec chats`: list, search, show, export, import and delete saved chats."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.help import HelpfulGroup
from edgespec.cli.options import OutputPath, json_option
from edgespec.cli.screen import is_terminal, note, print_json, print_table, printable, write_text
from edgespec.errors import ChatFileError, OptionError

if TYPE_CHECKING:
    from edgespec.chat.store import ChatStore, FoundChat, StoredChat

__all__ = ["chat_not_found", "command"]

# Maximum length, in characters, of a matching line in the table that `search` prints.
_MAX_LINE = 80


@click.group(
    "chats",
    cls=HelpfulGroup,
    foreign_commands={"ls": "list", "find": "search", "cat": "show", "rm": "delete"},
    short_help="List, search, show, export, import and delete saved chats.",
    examples=(
        "edgespec chats list",
        "edgespec chats search docker port",
        'edgespec chats show "Files by size"',
        "edgespec chats export last chat.html",
        "edgespec chats import conversations.json",
    ),
)
def command() -> None:
    """List, search, show, export, import and delete the chats that `edgespec chat` saved.

    CHAT is the ID of a chat, a part of its title, or `last` for the newest chat. If several titles match, the
    newest matching chat is used. To continue a chat, run `edgespec chat --resume CHAT`.
    """


@command.command(
    "list",
    short_help="List all chats.",
    examples=("edgespec chats list", "edgespec chats list --json"),
)
@json_option
def list_chats(as_json: bool) -> None:
    """List all saved chats, pinned chats first, then newest first."""
    _print_found("", as_json)


@command.command(
    "search",
    short_help="Search the titles and messages of all chats.",
    examples=("edgespec chats search docker port", "edgespec chats search --json backup"),
)
@click.argument("text", nargs=-1, required=True)
@json_option
def search_chats(text: Sequence[str], as_json: bool) -> None:
    """List the chats whose titles or messages contain all words of TEXT, ignoring case.

    The last column shows the best matching line. It is empty if the title contains all words.
    """
    _print_found(" ".join(text), as_json)


def _print_found(query: str, as_json: bool) -> None:
    from edgespec.chat.store import search

    found = search(_store().list(), query)
    if as_json:
        print_json({"chats": [_found_json(each, with_line=bool(query)) for each in found]})
        return
    if not found:
        note(f"No chat contains “{query}”." if query else "There are no saved chats yet.")
        return
    heads, rows = ["ID", "TITLE", "CHANGED"], [_row(each.chat) for each in found]
    if query:
        heads.append("MATCH")
        rows = [[*row, each.line[:_MAX_LINE]] for row, each in zip(rows, found, strict=True)]
    print_table(heads, rows, ("CHANGED",))


def _row(chat: StoredChat) -> list[str]:
    from edgespec.tui.numbers import ago

    states = (("unreadable", chat.problem), ("pinned", chat.pinned), ("unfinished", chat.unfinished))
    state = ", ".join(name for name, holds in states if holds)
    return [
        chat.id,
        f"{chat.title} ({state})" if state else chat.title,
        ago(chat.updated, datetime.now(UTC)),
    ]


def _found_json(found: FoundChat, *, with_line: bool) -> dict[str, Any]:
    chat = found.chat
    return {
        "id": chat.id,
        "title": chat.title,
        "updated": chat.updated.isoformat(),
        "messages": chat.message_count,
        "pinned": chat.pinned,
        "unfinished": chat.unfinished,
        "problem": chat.problem,
        "path": str(chat.path),
        **({"line": found.line} if with_line else {}),
    }


@command.command(
    "show",
    short_help="Print a chat.",
    examples=("edgespec chats show last", "edgespec chats show last --json"),
)
@click.argument("chat")
@json_option
def show_chat(chat: str, as_json: bool) -> None:
    """Print the messages of CHAT as Markdown.

    --json prints the chat in the format of chat files, with all versions of its messages.
    """
    from edgespec.chat.exporting import as_markdown

    store = _store()
    saved = store.load(_find(store, chat).id)
    if as_json:
        print_json(saved.to_json())
    else:
        write_text(as_markdown(saved))


@command.command(
    "export",
    short_help="Write a chat to a Markdown, HTML or JSON file, or to standard output.",
    examples=(
        "edgespec chats export last",
        "edgespec chats export last chat.html",
        "edgespec chats export last -",
    ),
)
@click.argument("chat")
@click.argument("file", type=OutputPath(), required=False)
@json_option
def export_chat(chat: str, file: str | None, as_json: bool) -> None:
    """Export CHAT to a new file. The extension of FILE selects the format: .md, .html or .json.

    A JSON file contains all versions of the messages and can be imported with `edgespec chats import`.
    Without FILE, the chat is written to a Markdown file in the current folder. If FILE is -, the Markdown is
    written to standard output.
    """
    from edgespec.chat.exporting import as_markdown, write_export

    store = _store()
    stored = _find(store, chat)
    saved = store.load(stored.id)
    if file == "-":
        text = as_markdown(saved)
        if as_json:
            print_json({"id": stored.id, "title": stored.title, "path": None, "text": text})
        else:
            write_text(text)
        return
    path = write_export(saved, file or "")
    if as_json:
        print_json({"id": stored.id, "title": stored.title, "path": str(path)})
    else:
        click.echo(printable(f"Exported “{stored.title}” to {path}."))


@command.command(
    "import",
    short_help="Add chats exported by ChatGPT, Claude, Open WebUI or edgespec.",
    examples=("edgespec chats import conversations.json", "edgespec chats import chatgpt-export.zip"),
)
@click.argument("file", type=click.Path())
@json_option
def import_chats(file: str, as_json: bool) -> None:
    """Import the chats in FILE, a JSON or ZIP export from ChatGPT, Claude, Open WebUI or edgespec.

    Each run adds new chats, even if the same ones were imported before.
    """
    from edgespec.chat.importing import ExportedChats
    from edgespec.tui.commands.chats import imported_text

    store, chats = _store(), ExportedChats(Path(file))
    added: list[str] = []
    try:
        added.extend(store.add(chat).id for chat in chats)
    except ChatFileError as error:
        if not added:
            raise
        raise ChatFileError(
            f"only the first {len(added)} chats were imported: {error.what}", error.next_step, code=error.code
        ) from error
    if as_json:
        print_json({"ids": added, "left_out": dict(+chats.left_out)})
    else:
        click.echo(imported_text(chats, "`edgespec chats list` shows all chats."))


@command.command(
    "delete",
    short_help="Delete a chat.",
    examples=("edgespec chats delete 20260301-120000-1a2b3c4d", "edgespec chats delete last --yes"),
)
@click.argument("chat")
@click.option("--yes", is_flag=True, help="Delete the chat without asking for confirmation.")
@json_option
def delete_chat(chat: str, yes: bool, as_json: bool) -> None:
    """Permanently delete CHAT.

    This also deletes the saved replies, the cache of earlier chats and the history of prompts, because they
    may contain its text. Other chats are kept. If several titles match CHAT, nothing is deleted.
    """
    from edgespec.api.saved_data import delete_chat

    store = _store()
    stored = _find(store, chat, only=True)
    if not yes:
        if as_json or not is_terminal(sys.stdin):
            raise OptionError(
                f"deleting the chat “{stored.title}” needs confirmation",
                "add --yes to confirm",
                code="confirmation_needed",
            )
        click.confirm(printable(f"Delete “{stored.title}”?"), abort=True, err=True)
    delete_chat(store, stored.id)
    if as_json:
        print_json({"deleted": stored.id, "title": stored.title})
    else:
        click.echo(printable(f"Deleted “{stored.title}”."))


def _store() -> ChatStore:
    from edgespec.chat.store import ChatStore

    return ChatStore()


def chat_not_found(chats: Sequence[StoredChat], wanted: str) -> ChatFileError:
    """Return the error for a chat that does not exist, which names the chats with the closest titles."""
    from edgespec.chat.store import closest_chats

    if not chats:
        what, advice = "there are no saved chats yet", "start one with `edgespec chat`"
    elif titles := [repr(chat.title) for chat in closest_chats(chats, wanted)]:
        advice = f"did you mean {' or '.join(titles)}? `edgespec chats list` shows all chats"
    else:
        advice = "choose one from `edgespec chats list`"
    if chats:
        what = f"there is no saved chat with the ID or title {wanted!r}"
    return ChatFileError(what, advice, code="chat_not_found")


def _find(store: ChatStore, wanted: str, *, only: bool = False) -> StoredChat:
    """Return the chat with this ID or title.

    Raises:
        ChatFileError: There is no such chat.
        OptionError: `only` is True, and several chats match.
    """
    from edgespec.chat.store import find_chat

    chats = store.list()
    found = find_chat(chats, wanted)
    if found is None:
        raise chat_not_found(chats, wanted)
    matching = [chat for chat in chats if wanted.casefold() in chat.title.casefold()]
    if only and wanted not in ("last", found.id) and len(matching) > 1:
        raise OptionError(
            f"{len(matching)} chats have {wanted!r} in their titles",
            f"use an ID, such as {found.id}",
            code="ambiguous",
        )
    return found
