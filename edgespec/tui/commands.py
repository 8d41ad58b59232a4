"""The table of slash commands, and the parser for typed ones."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "Typed", "completion", "nearest", "read"]


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    Attributes:
        name: The name without the slash.
        arguments: The arguments as help shows them.
        help: What the command does.
        aliases: Other names for it.
    """

    name: str
    arguments: str
    help: str
    aliases: tuple[str, ...] = ()


COMMANDS = (
    Command("help", "", "keys and commands", ("?", "h")),
    Command("new", "", "start a new chat; this one stays saved"),
    Command("clear", "", "start a new chat with the same system prompt and settings", ("reset",)),
    Command("regen", "", "write the last reply again", ("regenerate", "retry", "again")),
    Command("edit", "", "change your last message and send it again"),
    Command("copy", "[code|chat]", "copy the last reply, its last code block, or the whole chat"),
    Command("system", "[text|none]", "show or change the system prompt"),
    Command("set", "[name value]", "show or change the settings, or one of them"),
    Command("show", "", "show the models, the speed-up and the settings", ("info",)),
    Command("memory", "", "show the memory in use"),
    Command("save", "[title]", "save the chat now under a title"),
    Command("load", "[title]", "open a saved chat", ("open", "chats", "list")),
    Command("details", "", "show or hide measurements of the last reply", ("stats",)),
    Command("colours", "", "colour the words that were guessed right", ("colors", "origin")),
    Command("theme", "[light|dark]", "switch between light and dark"),
    Command("quit", "", "quit; the chat is saved", ("exit", "bye", "q")),
)

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
# A slash and a word, followed by a blank or the end, so that '/etc/hosts' and '/* C */' are messages.
_LINE = re.compile(r"/([A-Za-z?][\w?-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Typed:
    """A slash command as typed. `command` is None if the name is unknown."""

    name: str
    argument: str
    command: Command | None


def read(text: str) -> Typed | None:
    """Parse `text`. Returns None if it is a message for the model."""
    match = _LINE.fullmatch(text.rstrip())
    if match is None:
        return None
    name = match[1].lower()
    return Typed(name, (match[2] or "").strip(), _BY_NAME.get(name))


def nearest(name: str) -> str:
    """Return the name of the most similar command."""
    for known in _BY_NAME:
        if known.startswith(name):
            return _BY_NAME[known].name
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
    return _BY_NAME[close[0]].name if close else "help"


def completion(text: str) -> str:
    """Return the rest of the command name that is being typed, or an empty string."""
    if not text.startswith("/") or len(text) < 2:
        return ""
    for command in COMMANDS:
        if command.name.startswith(text[1:]) and command.name != text[1:]:
            return command.name[len(text) - 1 :]
    return ""
