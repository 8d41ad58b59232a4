"""The slash commands of the plain chat, which have the same names as in the full-screen chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edgespec.chat.exporting import messages_as_markdown, write_export
from edgespec.chat.importing import ExportedChats
from edgespec.chat.search import FoundChat, search
from edgespec.errors import CancelledError, OptionError
from edgespec.presets import preset_names, preset_path, write_preset
from edgespec.tui import commands
from edgespec.tui.copying import numbered_place, unknown_copy_argument
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import OpenChat, code_blocks
from edgespec.tui.preset_values import NO_PRESETS, preset_from_chat, preset_values, saved_text
from edgespec.tui.setting_commands import (
    SettingsChange,
    changed_schema,
    changed_settings,
    check_settings,
    unquoted,
)
from edgespec.tui.texts import memory_rows, plain_words, sentences, show_rows
from edgespec.tui.thinking import thinking_change
from edgespec.tui.tool_access import unanswered_calls
from edgespec.tui.transfer import chat_to_export, file_to_import, imported_text
from edgespec.tui.why import why_text

if TYPE_CHECKING:
    from edgespec.tui.plain import PlainChat

__all__ = ["run"]

# Maximum number of chats that /load and /search list.
_LISTED_CHATS = 20
# Maximum length of a line found by /search, in characters.
_MAX_LINE = 80


def run(chat: PlainChat, typed: commands.Typed) -> None:
    """Run a typed slash command.

    Raises:
        OptionError: The command or its argument is invalid, or the plain chat does not have the command.
        EdgespecError: The command failed.
    """
    if typed.command is None:
        raise commands.unknown(typed)
    work = _COMMANDS.get(typed.command.name)
    if work is None:
        name = typed.command.name
        raise OptionError(f"/{name} does not exist in the plain chat", _INSTEAD[name])
    work(chat, typed.argument)


def _help(chat: PlainChat, _argument: str) -> None:
    for each in commands.COMMANDS:
        if each.name in _COMMANDS:
            chat.answer(f"/{each.name} {each.arguments}".rstrip() + f": {_HELP.get(each.name, each.help)}")
    chat.answer(
        "To attach a file or a folder, write @ and its path in your message. @src/*.py attaches all matching"
        " files."
    )
    chat.answer(
        'Press Ctrl-C to stop a reply, or twice to quit. To write several lines, enclose them in """.'
    )


def _show(chat: PlainChat, _argument: str) -> None:
    _rows(chat, show_rows(chat.runtime, chat.current_chat, chat.method, chat.stats))


def _memory(chat: PlainChat, _argument: str) -> None:
    _rows(chat, memory_rows(chat.runtime.memory()))


def _rows(chat: PlainChat, rows: list[tuple[str, str]]) -> None:
    for label, value in rows:
        chat.answer(f"{label}: {value}")


def _why(chat: PlainChat, _argument: str) -> None:
    chat.answer(why_text(chat.runtime, chat.method, chat.stats, chat.current_chat.settings))


def _set(chat: PlainChat, argument: str) -> None:
    if argument:
        _apply(chat, changed_settings(argument, chat.current_chat.settings, chat.runtime))
    else:
        _show(chat, "")


def _schema(chat: PlainChat, argument: str) -> None:
    _apply(chat, changed_schema(argument, chat.current_chat.settings))


def _think(chat: PlainChat, argument: str) -> None:
    _apply(chat, thinking_change(argument, chat.current_chat.settings, chat.runtime))


def _apply(chat: PlainChat, change: SettingsChange) -> None:
    if change.settings is not None:
        check_settings(change.settings, chat.runtime)
        chat.current_chat.settings = change.settings
        chat.save()
    chat.answer(change.note)


def _system(chat: PlainChat, argument: str) -> None:
    if argument:
        chat.current_chat.system = None if argument.lower() == "none" else unquoted(argument)
        chat.save()
    chat.answer(f"System prompt: {chat.current_chat.system or 'none'}")


def _model(chat: PlainChat, argument: str) -> None:
    # Imported only when used, because this import would delay the first prompt.
    from edgespec.tui import plain_models

    if argument:
        plain_models.choose_model(chat, unquoted(argument))
    else:
        plain_models.list_models(chat)


def _preset(chat: PlainChat, argument: str) -> None:
    word, _, name = argument.partition(" ")
    if word == "save":
        _save_preset(chat, name.strip())
    elif argument:
        _apply_preset(chat, argument)
    elif names := preset_names():
        chat.answer("\n".join(names))
        chat.note("To use one, type /preset and its name.")
    else:
        chat.answer(NO_PRESETS)


def _apply_preset(chat: PlainChat, name: str) -> None:
    values = preset_values(name, chat.current_chat)
    note = f"The preset {name} takes effect with your next message."
    chat.current_chat.system = values.system
    _apply(chat, SettingsChange(values.settings, note))
    if values.remark:
        chat.note(values.remark)
    if values.target and values.target != chat.model_name:
        _model(chat, values.target)


def _save_preset(chat: PlainChat, name: str) -> None:
    preset = preset_from_chat(name, chat.current_chat, chat.model_name)
    if preset_path(name).exists():
        question = f"Replace the existing preset {name}? Type yes or no."
        if chat.ask(question, ("yes", "no")) != "yes":
            chat.answer("The preset was not saved.")
            return
    chat.answer(saved_text(name, write_preset(preset), chat.current_chat))


def _tools(chat: PlainChat, argument: str) -> None:
    chat.tools.command(argument)


def _copy(chat: PlainChat, argument: str) -> None:
    part, _, number = argument.lower().partition(" ")
    reply = chat.current_chat.last_reply
    if part in ("chat", "all"):
        text = messages_as_markdown(chat.current_chat.messages)
    elif part in ("code", "block"):
        blocks = code_blocks(reply.content) if reply is not None else []
        text = blocks[numbered_place(blocks, number.strip() or str(len(blocks)))].rstrip("\n")
    elif part in ("", "reply", "last"):
        text = reply.content.strip() if reply is not None else ""
    else:
        raise unknown_copy_argument(argument)
    if not text:
        raise OptionError("There is nothing to copy yet", "Send a message first")
    chat.answer(text)


def _export(chat: PlainChat, argument: str) -> None:
    path = write_export(chat_to_export(chat.current_chat, chat.runtime.target.name), argument)
    chat.answer(f"Exported this chat to {path}.")


def _import(chat: PlainChat, argument: str) -> None:
    chats = ExportedChats(file_to_import(argument))
    try:
        chat.archive.add_now(chats)
    finally:
        if chats.read_count:
            chat.answer(imported_text(chats, "Type /load for the list of chats."))


def _search(chat: PlainChat, argument: str) -> None:
    _list_chats(chat, search(chat.archive.list_now(), unquoted(argument)), f"No chat contains “{argument}”.")


def _fork(chat: PlainChat, _argument: str) -> None:
    old = chat.current_chat
    if old.tree.tip is None:
        raise OptionError("There is nothing to fork: the chat is empty", "Send a message first")
    chat.current_chat = old.forked(old.tree.tip)
    chat.save()
    chat.answer(old.fork_text(chat.current_chat))


def _delete(chat: PlainChat, _argument: str) -> None:
    current = chat.current_chat
    place = current.last_place("user")
    if place is None:
        raise OptionError("There is no message to delete", "Send a message first")
    path = current.tree.path
    current.change_messages(current.tree.without(place))
    chat.save()
    deleted = count(len(path) - path.index(place), "message")
    chat.answer(f"Deleted {deleted}. Type /undo to restore them.")


def _undo(chat: PlainChat, _argument: str) -> None:
    current = chat.current_chat
    if not current.tree.deleted:
        raise OptionError("There is nothing to undo", "/undo restores messages that you deleted with /delete")
    current.change_messages(current.tree.restored())
    chat.save()
    chat.answer(f"Restored. The chat has {count(len(current.entries), 'message')}.")


def _pin(chat: PlainChat, _argument: str) -> None:
    current = chat.current_chat
    if not current.entries:
        raise OptionError("There is nothing to pin: the chat is empty", "Send a message first")
    current.pinned = not current.pinned
    chat.save()
    chat.answer("This chat now stays at the top of the list." if current.pinned else "Unpinned this chat.")


def _new(chat: PlainChat, _argument: str) -> None:
    chat.open_new(OpenChat(chat.first_system, dict(chat.first_settings)))


def _clear(chat: PlainChat, _argument: str) -> None:
    chat.open_new(OpenChat(chat.current_chat.system, dict(chat.current_chat.settings)))


def _load(chat: PlainChat, argument: str) -> None:
    if argument:
        chat.resume(unquoted(argument))
        return
    _list_chats(chat, search(chat.archive.list_now(), ""), "There are no saved chats yet.")


def _list_chats(chat: PlainChat, found: Sequence[FoundChat], nothing: str) -> None:
    for stored, line in found[:_LISTED_CHATS]:
        about = f"{ago(stored.updated, datetime.now(UTC))}, {count(stored.message_count, 'message')}"
        if stored.problem:
            about = "unreadable"
        pinned = "pinned, " if stored.pinned else ""
        chat.answer(f"{stored.title} ({pinned}{about})" + (f": {line[:_MAX_LINE]}" if line else ""))
    if len(found) > _LISTED_CHATS:
        chat.note(f"{len(found) - _LISTED_CHATS:,} more chats. Type /search and a word to find them.")
    chat.note("To open one, type /load and its title." if found else nothing)


def _regen(chat: PlainChat, _argument: str) -> None:
    place = chat.current_chat.last_place("user")
    if place is None:
        raise OptionError("There is no reply to regenerate yet", "Send a message first")
    chat.take_turn(chat.current_chat.regenerate(place))


def _continue(chat: PlainChat, _argument: str) -> None:
    if not chat.current_chat.entries:
        unfinished = next((each for each in chat.archive.list_now() if each.unfinished), None)
        if unfinished is None:
            raise OptionError("There is no unfinished reply to continue", "Type /load for the list of chats")
        chat.open(unfinished)
    if calls := unanswered_calls(chat.current_chat):
        turn = chat.make_calls(calls)
    elif (place := chat.current_chat.last_place("user", "tool", "assistant")) is not None:
        turn = chat.current_chat.continue_reply(place)
    else:
        turn = None
    if turn is not None:
        chat.take_turn(turn)


def _rename(chat: PlainChat, argument: str) -> None:
    if not chat.current_chat.entries:
        raise OptionError("There is nothing to save: the chat is empty", "Send a message first")
    title = " ".join(unquoted(argument).split())[:80]
    chat.current_chat.title = title or chat.current_chat.title
    chat.save()
    chat.answer(f"Saved as {chat.current_chat.shown_title!r}.")


def _race(chat: PlainChat, argument: str) -> None:
    from edgespec.tui.race import race_method, start_race

    method = race_method(chat.runtime, chat.current_chat)
    chat.note(f"Racing plain decoding against {method}.")
    _, job, _ = start_race(chat.model_thread, chat.current_chat, method, argument)
    try:
        race = job.result()
    except CancelledError as error:
        chat.note(sentences(error.what))
        return
    chat.answer("\n".join([plain_words(race.headline()), *race.remarks()]))


def _quit(chat: PlainChat, _argument: str) -> None:
    chat.leaving = True


_COMMANDS: dict[str, Callable[[PlainChat, str], None]] = {
    "help": _help,
    "show": _show,
    "model": _model,
    "set": _set,
    "think": _think,
    "schema": _schema,
    "system": _system,
    "tools": _tools,
    "preset": _preset,
    "new": _new,
    "load": _load,
    "search": _search,
    "regen": _regen,
    "continue": _continue,
    "fork": _fork,
    "delete": _delete,
    "undo": _undo,
    "copy": _copy,
    "export": _export,
    "import": _import,
    "quit": _quit,
    "clear": _clear,
    "rename": _rename,
    "pin": _pin,
    "why": _why,
    "race": _race,
    "memory": _memory,
}
# Help texts of commands that work differently in the plain chat.
_HELP = {
    "help": "list the commands",
    "undo": "restore the last deleted messages",
    "copy": "print the last reply, a code block from it, or the whole chat",
}
# The commands that only the full-screen chat has, and what to do instead.
_INSTEAD = {
    "edit": "Type /delete, then send the edited message",
    "editor": "Type /copy to print the last reply",
    "details": "Type /why for the speed of the last reply, or /memory for the memory use",
    "colours": "Type /why to see how many guesses were accepted",
    "vi": "Your terminal handles the keys here. For vi keys, start the chat with rlwrap",
    "theme": "The plain chat uses the colours of your terminal",
}
