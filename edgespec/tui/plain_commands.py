"""The slash commands of the plain chat, which have the same names as in the full-screen chat."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edgespec.errors import CancelledError, OptionError
from edgespec.tui import commands
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.setting_commands import (
    SettingsChange,
    changed_schema,
    changed_settings,
    check_settings,
    unquoted,
)
from edgespec.tui.texts import memory_rows, plain_words, sentences, show_rows
from edgespec.tui.why import why_text

if TYPE_CHECKING:
    from edgespec.tui.plain import PlainChat

__all__ = ["run"]

# Maximum number of chats that /load lists.
_LISTED_CHATS = 20


def run(chat: PlainChat, typed: commands.Typed) -> None:
    """Run a typed slash command.

    Raises:
        OptionError: The command or its argument is invalid, or the command needs the full-screen chat.
        ChatFileError: A chat could not be read.
    """
    if typed.command is None:
        raise commands.unknown(typed)
    work = _COMMANDS.get(typed.command.name)
    if work is None:
        raise OptionError(
            f"/{typed.command.name} needs the full-screen chat",
            "Type /help for the commands of the plain chat",
        )
    work(chat, typed.argument)


def _help(chat: PlainChat, _argument: str) -> None:
    for each in commands.COMMANDS:
        if each.name in _COMMANDS:
            chat.answer(f"/{each.name} {each.arguments}".rstrip() + f": {each.help}")
    chat.answer('Ctrl-C stops a reply; pressed twice, it quits. To write several lines, enclose them in """.')


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
    _set(chat, f"thinking {argument}".rstrip())


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


def _new(chat: PlainChat, _argument: str) -> None:
    chat.open_new(OpenChat(chat.first_system, dict(chat.first_settings)))


def _clear(chat: PlainChat, _argument: str) -> None:
    chat.open_new(OpenChat(chat.current_chat.system, dict(chat.current_chat.settings)))


def _load(chat: PlainChat, argument: str) -> None:
    if argument:
        chat.resume(unquoted(argument))
        return
    chats = chat.archive.list_now()
    for each in chats[:_LISTED_CHATS]:
        when = ago(each.updated, datetime.now(UTC))
        chat.answer(f"{each.title} ({when}, {count(each.message_count, 'message')})")
    chat.note("To open one, type /load and its title." if chats else "There are no saved chats yet.")


def _regen(chat: PlainChat, _argument: str) -> None:
    place = chat.current_chat.last_place("user")
    if place is None:
        raise OptionError("There is no reply to regenerate yet", "Send a message first")
    chat.take_turn(chat.current_chat.regenerate(place))


def _continue(chat: PlainChat, _argument: str) -> None:
    place = chat.current_chat.last_place("user", "assistant")
    if place is None:
        raise OptionError("There is no reply to continue yet", "Type /load for the list of chats")
    chat.take_turn(chat.current_chat.continue_reply(place))


def _save(chat: PlainChat, argument: str) -> None:
    if not chat.current_chat.entries:
        raise OptionError("There is nothing to save: the chat is empty", "Send a message first")
    title = " ".join(unquoted(argument).split())[:80]
    chat.current_chat.title = title or chat.current_chat.title
    chat.save()
    chat.answer(f"Saved as {chat.current_chat.shown_title!r}.")


def _race(chat: PlainChat, argument: str) -> None:
    from edgespec.tui.race import start_race

    chat.note("Racing plain decoding against auto.")
    _, job, _ = start_race(chat.model_thread, chat.current_chat, argument)
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
    "set": _set,
    "schema": _schema,
    "system": _system,
    "think": _think,
    "new": _new,
    "load": _load,
    "regen": _regen,
    "continue": _continue,
    "save": _save,
    "memory": _memory,
    "why": _why,
    "race": _race,
    "clear": _clear,
    "quit": _quit,
}
