"""Run slash commands in the plain chat, and print their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from edgespec.chat.store import StoredChat
from edgespec.errors import CancelledError, OptionError
from edgespec.tui.commands import table
from edgespec.tui.commands.results import (
    Action,
    Change,
    Copy,
    Generate,
    Nothing,
    Open,
    Problem,
    Question,
    Result,
    RunningRace,
    Table,
    Text,
    all_of,
)
from edgespec.tui.commands.setup import chosen_model
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.texts import plain_words, sentences

if TYPE_CHECKING:
    from edgespec.tui.plain import PlainChat

__all__ = ["ACTIONS", "run"]

_Do: TypeAlias = Callable[["PlainChat", str], None]


def run(chat: PlainChat, typed: table.Typed) -> None:
    """Run a typed slash command.

    Raises:
        OptionError: The command or its argument is invalid, or the plain chat does not have the command.
        EdgespecError: The command failed.
    """
    command = typed.command
    if command is None:
        raise table.unknown(typed)
    if command.instead:
        raise OptionError(f"/{command.name} does not exist in the plain chat", command.instead)
    _show(chat, command.run(chat.command_context(typed.argument)))


def _show(chat: PlainChat, result: Result) -> None:
    """Print the result of a command, or do what it says. Raises EdgespecError if that fails."""
    for part in all_of(result):
        match part:
            case Text():
                _print(chat.note if part.is_hint else chat.answer, part.in_plain or part.text)
            case Table():
                for label, value in part.rows:
                    chat.answer(f"{label}: {value}")
            case Nothing():
                chat.note(sentences(part.reason, part.next_step))
            case Problem():
                chat.note(sentences(part.error.what, part.error.next_step))
            case Change():
                part.apply(chat.current_chat)
                chat.save()
                _print(chat.answer, part.in_plain or part.text)
            case Open(chat=StoredChat() as stored):
                chat.open(stored)
            case Open(chat=OpenChat() as new):
                _open_new(chat, new, part.note)
            case Generate():
                _generate(chat, part)
            case Copy():
                if not part.text:
                    raise OptionError("There is nothing to copy yet", "Send a message first")
                chat.answer(part.text)
            case Question():
                _ask(chat, part)
            case RunningRace():
                _await_race(chat, part)
            case Action():
                _act(chat, part)


def _print(write: Callable[[str], None], text: str) -> None:
    if text:
        write(text)


def _open_new(chat: PlainChat, new: OpenChat, note: str) -> None:
    if not new.entries:
        chat.open_new(new)
        return
    chat.current_chat = new
    chat.save()
    chat.answer(note)


def _generate(chat: PlainChat, generate: Generate) -> None:
    started = generate.start(chat.current_chat)
    if not isinstance(started, RunningTurn):
        started = chat.make_calls(started) if started else None
    if started is not None:
        chat.take_turn(started)


def _ask(chat: PlainChat, question: Question) -> None:
    if chat.ask(f"{question.question} Type yes or no.", ("yes", "no")) == "yes":
        _show(chat, question.then())
    else:
        chat.answer(question.declined)


def _await_race(chat: PlainChat, running: RunningRace) -> None:
    chat.note(f"Racing plain decoding against {running.method}.")
    try:
        race = running.race.race.result()
    except CancelledError as error:
        chat.note(sentences(error.what))
        return
    chat.answer("\n".join([plain_words(race.headline()), *race.remarks()]))


def _act(chat: PlainChat, action: Action) -> None:
    if action.otherwise is not None:
        _show(chat, action.otherwise())
    else:
        ACTIONS[action.name](chat, action.value)


def _quit(chat: PlainChat) -> None:
    chat.leaving = True


def _delete(chat: PlainChat) -> None:
    current = chat.current_chat
    place, path = current.last_place("user"), current.tree.path
    assert place is not None
    current.change_messages(current.tree.without(place))
    chat.save()
    deleted = count(len(path) - path.index(place), "message")
    chat.answer(f"Deleted {deleted}. Type /undo to restore them.")


def _undo(chat: PlainChat) -> None:
    current = chat.current_chat
    current.change_messages(current.tree.restored())
    chat.save()
    chat.answer(f"Restored. The chat has {count(len(current.entries), 'message')}.")


def _use_model(chat: PlainChat, reference: str) -> None:
    _show(chat, chosen_model(chat.runtime, reference))


def _download(chat: PlainChat, reference: str) -> None:
    # Imported only when used, because this import would delay the first prompt.
    from edgespec.tui.plain_models import download_model

    if download_model(chat, reference):
        _use_model(chat, reference)


def _switch(chat: PlainChat, reference: str) -> None:
    from edgespec.tui.plain_models import switch_model

    switch_model(chat, reference)


ACTIONS: dict[str, _Do] = {
    "quit": lambda chat, _: _quit(chat),
    "delete": lambda chat, _: _delete(chat),
    "undo": lambda chat, _: _undo(chat),
    "use_model": _use_model,
    "download": _download,
    "switch": _switch,
    "start_tools": lambda chat, _: chat.tools.start_servers(),
    "stop_tools": lambda chat, _: chat.tools.stop_servers(),
    # The plain chat shows no list of chats that could be out of date.
    "list_changed": lambda *_: None,
}
"""What the plain chat does for the actions of commands."""
