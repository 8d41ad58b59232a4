"""Slash commands: the table, how a line is read, and the nearest name to a wrong one."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "Typed", "completion", "nearest", "read"]


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command: its name, what may follow, what it does, and other names people type."""

    name: str
    arguments: str
    help: str
    aliases: tuple[str, ...] = ()


COMMANDS = (
    Command("help", "", "keys and commands", ("?", "h")),
    Command("new", "", "a new chat; this one stays in the list"),
    Command("clear", "", "an empty chat with the same system prompt and settings", ("reset",)),
    Command("regen", "", "write the last reply again", ("regenerate", "retry", "again")),
    Command("edit", "", "change your last message and send it again"),
    Command("copy", "[code|chat]", "copy the last reply, its last code block, or the whole chat"),
    Command("system", "[text|none]", "see or change the system prompt"),
    Command("set", "[name value]", "sampling settings, all or one"),
    Command("show", "", "the model, the method and the settings in use", ("info",)),
    Command("memory", "", "what takes memory, and what is kept of other chats"),
    Command("save", "[title]", "save the chat now, and give it a title"),
    Command("load", "[title]", "open a saved chat", ("open", "chats", "list")),
    Command("details", "", "show or hide speed, acceptance and time of each phase", ("stats",)),
    Command("colours", "", "colour the tokens by who wrote them", ("colors", "origin")),
    Command("theme", "[light|dark]", "light or dark"),
    Command("quit", "", "leave; the chat is saved", ("exit", "bye", "q")),
)

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
# A slash, a word, then nothing or a blank: '/etc/hosts' and '/* C */' are ordinary text.
_LINE = re.compile(r"/([A-Za-z?][\w?-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Typed:
    """A slash command as typed. `command` is None when there is none of that name."""

    name: str
    argument: str
    command: Command | None


def read(text: str) -> Typed | None:
    """The command in `text`, or None when it is a message for the model."""
    match = _LINE.fullmatch(text.rstrip())
    if match is None:
        return None
    name = match[1].lower()
    return Typed(name, (match[2] or "").strip(), _BY_NAME.get(name))


def nearest(name: str) -> str:
    """The command whose name is most like `name`."""
    for known in _BY_NAME:
        if known.startswith(name):
            return _BY_NAME[known].name
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
    return _BY_NAME[close[0]].name if close else "help"


def completion(text: str) -> str:
    """What would complete the command being typed, or an empty string."""
    if not text.startswith("/") or len(text) < 2:
        return ""
    for command in COMMANDS:
        if command.name.startswith(text[1:]) and command.name != text[1:]:
            return command.name[len(text) - 1 :]
    return ""
