"""The table of slash commands, and functions that parse and complete typed commands.

To add a command, write its function and its `Command` in the module for its topic. Both chats, the help,
command completion and the documentation use this table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.errors import OptionError
from edgespec.system import spelling
from edgespec.tui.commands import chats, information, setup
from edgespec.tui.commands.results import Action, Command, Context, Result, Text

_PLAIN_HELP = (
    "To attach a file or a folder, write @ and its path in your message. @src/*.py attaches all matching"
    ' files.\nPress Ctrl-C to stop a reply, or twice to quit. To write several lines, enclose them in """.'
)


def _help(_context: Context) -> Result:
    return Action("help", otherwise=_plain_help)


def _plain_help() -> Result:
    works = [each for each in COMMANDS if not each.instead]
    return Text("\n".join([*(f"{each.usage}: {each.in_plain or each.help}" for each in works), _PLAIN_HELP]))


COMMANDS: tuple[Command, ...] = (
    Command(
        "help",
        "",
        "show all keyboard shortcuts and commands",
        _help,
        ("?", "h"),
        in_plain="list the commands",
    ),
    *information.SHOW,
    *setup.COMMANDS,
    *chats.OPENING,
    *chats.MESSAGES,
    *chats.KEEPING,
    *information.SPEED,
    *setup.APPEARANCE,
)
"""All commands, in the order of the help page."""

# Matches a slash command and its argument, but not a path such as `/etc/hosts`.
_LINE = re.compile(r"/([A-Za-z?][\w?-]*)(?:\s+(.*))?", re.DOTALL)
# Matches a command that reads a file. `/schema none` does not take a file.
_PATH = re.compile(r"/(?:import|schema) +(?!none$)(.*)")


def _by_name() -> dict[str, Command]:
    return {name: command for command in COMMANDS for name in (command.name, *command.aliases)}


@dataclass(frozen=True, slots=True)
class Typed:
    """A slash command that the user typed. `command` is None if the typed name is unknown."""

    name: str
    argument: str
    command: Command | None


def read(text: str) -> Typed | None:
    """Parse a slash command, or return None if `text` is a message for the model."""
    match = _LINE.fullmatch(text.rstrip())
    if match is None:
        return None
    name = match[1].lower()
    return Typed(name, (match[2] or "").strip(), _by_name().get(name))


def unknown(typed: Typed) -> OptionError:
    """Return the error for a command with an unknown or removed name."""
    if (command := f"/{typed.name}") in spelling.REMOVED_NAMES:
        return OptionError(
            f"The command {command} was removed", spelling.REMOVED_NAMES[command], code="option_removed"
        )
    near = nearest(typed.name)
    suggestion = f"Did you mean /{near}?" if near else "Type /help for all commands."
    return OptionError(
        f"Unknown command /{typed.name}",
        f"{suggestion} To send this as a message, type a space first",
        code="command_unavailable",
    )


def nearest(name: str) -> str:
    """Return the command name most similar to `name`, or an empty string if none is similar."""
    names = _by_name()
    close = spelling.nearest(name, names)
    return names[close[0]].name if close else ""


def completion(text: str) -> str:
    """Return the rest of a partially typed command name, or an empty string if nothing matches."""
    if not text.startswith("/") or len(text) < 2:
        return ""
    names = (
        name for name in (*(command.name for command in COMMANDS), *_by_name()) if name.startswith(text[1:])
    )
    return next(names, text[1:])[len(text) - 1 :]


def typed_path(text: str) -> tuple[str, int] | None:
    """Return the path being typed as a command's argument, and the column where it starts."""
    match = _PATH.fullmatch(text)
    return (match[1], match.start(1)) if match else None


def hint(text: str, width: int) -> str:
    """Return a hint for a partially typed command: the matching names, or what the command does.

    Args:
        text: The text of the input.
        width: Maximum width of the hint in cells.

    Returns:
        The hint, or an empty string if `text` is a message or its command is unknown.
    """
    typed = Typed("", "", None) if text == "/" else read(text)
    if typed is None or "\n" in text:
        return ""
    command = typed.command
    if command is None and not typed.argument:
        matching = [each for each in COMMANDS if each.name.startswith(typed.name)]
        if not matching:
            matching = [each for name, each in _by_name().items() if name.startswith(typed.name)]
        if len(matching) > 1:
            return _names(matching, width)
        command = matching[0] if matching else None
    if command is None:
        return ""
    described = f"{command.usage} · {command.help}"
    return described if len(described) <= width else command.usage


def _names(matching: Sequence[Command], width: int) -> str:
    """Return as many command names as fit in `width` cells."""
    names = [f"/{command.name}" for command in matching]
    shown = " ".join(names)
    while len(shown) > width and names:
        names.pop()
        shown = " ".join((*names, "… F1 lists all"))
    return shown
