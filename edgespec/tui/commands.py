"""The table of slash commands and the parser for typed commands."""

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
        arguments: The arguments as shown in the help.
        help: What the command does.
        aliases: Other names for the command.
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
# A slash and a word, followed by whitespace or the end of the text. '/etc/hosts' and '/* C */' are messages.
_LINE = re.compile(r"/([A-Za-z?][\w?-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Typed:
    """A slash command that the user typed. `command` is None if its name is unknown."""

    name: str
    argument: str
    command: Command | None


def read(text: str) -> Typed | None:
    """Parse a slash command. Return None if `text` is a message for the model."""
    match = _LINE.fullmatch(text.rstrip())
    if match is None:
        return None
    name = match[1].lower()
    return Typed(name, (match[2] or "").strip(), _BY_NAME.get(name))


def nearest(name: str) -> str:
    """Return the command name most similar to `name`."""
    for known in _BY_NAME:
        if known.startswith(name):
            return _BY_NAME[known].name
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
    return _BY_NAME[close[0]].name if close else "help"


def completion(text: str) -> str:
    """Return the missing rest of a partly typed command name, or an empty string if there is none."""
    if not text.startswith("/") or len(text) < 2:
        return ""
    for command in COMMANDS:
        if command.name.startswith(text[1:]) and command.name != text[1:]:
            return command.name[len(text) - 1 :]
    return ""
