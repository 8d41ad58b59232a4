"""The slash commands: their names, how they are parsed, and what they do."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from edgespec import spelling
from edgespec.chat.exporting import messages_as_markdown
from edgespec.errors import OptionError
from edgespec.tui import selection
from edgespec.tui.chat_list import rename_open_chat, restore_chat
from edgespec.tui.chat_settings import set_settings, set_system
from edgespec.tui.copying import copy_text, unknown_copy_argument
from edgespec.tui.editor import show_message
from edgespec.tui.model_choice import choose_or_list
from edgespec.tui.presets import preset
from edgespec.tui.saved_chats import continue_reply, open_by_title, save_as
from edgespec.tui.setting_commands import SettingsChange, changed_schema, changed_settings, unquoted
from edgespec.tui.texts import memory_rows, show_rows
from edgespec.tui.themes import choose_theme
from edgespec.tui.thinking import think
from edgespec.tui.transfer import export_chat, import_chats
from edgespec.tui.why import show_why
from edgespec.tui.widgets.messages import Panel
from edgespec.tui.widgets.pairs import Pairs

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = [
    "COMMANDS",
    "Command",
    "Typed",
    "completion",
    "hint",
    "nearest",
    "read",
    "run",
    "typed_path",
    "unknown",
]

_Run: TypeAlias = Callable[["ChatScreen", str], Awaitable[None]]


async def _copy(screen: ChatScreen, argument: str) -> None:
    part, _, number = argument.lower().partition(" ")
    if part in ("code", "block") and number:
        await screen.code_copier.copy_numbered(screen, screen.current_chat.last_reply, number.strip())
    elif part in ("code", "block"):
        await screen.action_copy_code()
    elif part in ("chat", "all"):
        await copy_text(screen, messages_as_markdown(screen.current_chat.messages), "chat")
    elif part in ("", "reply", "last"):
        await screen.action_copy_reply()
    else:
        raise unknown_copy_argument(argument)


async def _editor(screen: ChatScreen, _argument: str) -> None:
    if (reply := screen.current_chat.last_reply) is not None:
        show_message(screen, reply.message)
    else:
        screen.say("There is no reply to open yet.")


async def _system(screen: ChatScreen, argument: str) -> None:
    if argument:
        await set_system(screen, None if argument.lower() == "none" else unquoted(argument))
    else:
        screen.action_system()


async def _set(screen: ChatScreen, argument: str) -> None:
    word, _, text = argument.partition(" ")
    if not word:
        screen.action_settings()
    elif word == "system":
        await _system(screen, text.strip())
    else:
        await _apply(screen, changed_settings(argument, screen.current_chat.settings, screen.runtime))


async def _schema(screen: ChatScreen, argument: str) -> None:
    await _apply(screen, changed_schema(argument, screen.current_chat.settings))


async def _apply(screen: ChatScreen, change: SettingsChange) -> None:
    if change.settings is None:
        await screen.transcript.note(change.note)
    else:
        await set_settings(screen, change.settings, change.note)


async def _show(screen: ChatScreen, _argument: str) -> None:
    rows = show_rows(screen.runtime, screen.current_chat, screen.method, screen.stats)
    await screen.transcript.show_panel(Panel("In use", Pairs(rows, stack_below=24)))


async def _memory(screen: ChatScreen, _argument: str) -> None:
    rows = memory_rows(screen.runtime.memory())
    await screen.transcript.show_panel(Panel("Memory", Pairs(rows, stack_below=24)))


async def _race(screen: ChatScreen, argument: str) -> None:
    # Imported only when used, because this import would delay the first screen.
    from edgespec.tui.race import open_race

    await open_race(screen, argument)


async def _rename(screen: ChatScreen, argument: str) -> None:
    if argument or not screen.current_chat.entries:
        await save_as(screen, unquoted(argument))
    else:
        screen.run_worker(rename_open_chat(screen))


async def _load(screen: ChatScreen, argument: str) -> None:
    if argument:
        await open_by_title(screen, unquoted(argument))
    else:
        await screen.show_chats()


async def _search(screen: ChatScreen, argument: str) -> None:
    await screen.show_chats(unquoted(argument))


async def _fork(screen: ChatScreen, _argument: str) -> None:
    if (place := screen.current_chat.tree.tip) is not None:
        await selection.fork(screen, place)
    else:
        screen.say("There is nothing to fork: the chat is empty.")


async def _delete(screen: ChatScreen, _argument: str) -> None:
    if (place := screen.current_chat.last_place("user")) is not None:
        await selection.delete(screen, place)
    else:
        screen.say("There is no message to delete.")


async def _undo(screen: ChatScreen, _argument: str) -> None:
    if not await restore_chat(screen):
        await selection.undo(screen)


async def _model(screen: ChatScreen, argument: str) -> None:
    if argument:
        await choose_or_list(screen, unquoted(argument))
    else:
        screen.action_models()


async def _pin(screen: ChatScreen, _argument: str) -> None:
    chat = screen.current_chat
    if not chat.entries:
        screen.say("There is nothing to pin: the chat is empty.")
        return
    chat.pinned = not chat.pinned
    if await screen.save():
        screen.say("This chat now stays at the top of the list." if chat.pinned else "Unpinned this chat.")


async def _vi(screen: ChatScreen, argument: str) -> None:
    if argument.lower() not in ("", "on", "off"):
        raise OptionError(f"Unknown argument {argument!r} for /vi", "Choose on or off")
    use = argument.lower() == "on" if argument else not screen.preferences.vi
    screen.use_vi_keys(use)
    screen.say(f"vi keys are {'on: press Esc for normal mode' if use else 'off'}.")


async def _tools(screen: ChatScreen, argument: str) -> None:
    await screen.tool_use.command(argument)


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    Attributes:
        name: The name without the slash.
        arguments: The arguments, as shown in the help.
        help: What the command does.
        run: A function, or the name of a chat screen action.
        aliases: Other names for the command.
    """

    name: str
    arguments: str
    help: str
    run: _Run | str
    aliases: tuple[str, ...] = ()


COMMANDS = (
    Command("help", "", "show all keyboard shortcuts and commands", "help", ("?", "h")),
    Command("show", "", "show the models, the speed-up and the settings", _show, ("info",)),
    Command("model", "[name]", "choose or download a model", _model, ("models",)),
    Command("set", "[name value]", "show all settings, or change one of them", _set, ("settings",)),
    Command("think", "[on|off|auto]", "choose whether the model reasons before it answers", think),
    Command("schema", "[file|none]", "make replies satisfy the JSON schema in a file", _schema),
    Command("system", "[text|none]", "show or change the system prompt", _system),
    Command("tools", "[on|off]", "choose the tools that the model can call (MCP servers)", _tools),
    Command("preset", "[name|save name]", "use or save a system prompt, model and settings", preset),
    Command("new", "", "start a new chat; this one stays saved", "new_chat"),
    Command("load", "[title]", "open a saved chat", _load, ("open", "chats", "list")),
    Command("search", "[text]", "search the titles and messages of all chats", _search, ("find",)),
    Command("regen", "", "regenerate the last reply", "regenerate", ("regenerate", "retry", "again")),
    Command("continue", "", "finish an interrupted reply in this chat or the previous one", continue_reply),
    Command("edit", "", "edit and resend your last message", "edit_last"),
    Command("fork", "", "start a new chat with the messages of this one", _fork, ("branch",)),
    Command("delete", "", "delete your last message and the reply to it", _delete),
    Command("undo", "", "restore the last deleted messages or chat", _undo),
    Command("copy", "[code [n]|chat]", "copy the last reply, a code block from it, or the whole chat", _copy),
    Command("editor", "", "open the last reply in your text editor", _editor, ("view",)),
    Command("export", "[file]", "write this chat to a file: .md, .json or .html", export_chat),
    Command("import", "file", "add chats exported by ChatGPT, Claude, Open WebUI or edgespec", import_chats),
    Command("quit", "", "quit; the chat is saved", "app.quit", ("exit", "bye", "q")),
    Command("clear", "", "start a new chat with the same system prompt and settings", "clear", ("reset",)),
    Command("rename", "[title]", "rename this chat, which is saved automatically", _rename, ("save",)),
    Command("pin", "", "pin this chat to the top of the list of chats, or unpin it", _pin),
    Command("details", "", "show or hide details of the last reply", "details", ("stats",)),
    Command("why", "", "explain the speed of the last reply", show_why),
    Command("race", "[message]", "compare a reply with and without the speed-up", _race),
    Command("memory", "", "show memory use", _memory),
    Command("colours", "", "colour the words that were guessed correctly", "origin", ("colors", "origin")),
    Command("vi", "[on|off]", "turn vi keys in the input on or off", _vi),
    Command("theme", "[name]", "list the colour themes, or choose one", choose_theme),
)  # fmt: skip

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
# Matches a slash command and its argument, but not a path such as `/etc/hosts`.
_LINE = re.compile(r"/([A-Za-z?][\w?-]*)(?:\s+(.*))?", re.DOTALL)
# Matches a command that reads a file. `/schema none` names no file.
_PATH = re.compile(r"/(?:import|schema) +(?!none$)(.*)")


@dataclass(frozen=True, slots=True)
class Typed:
    """A slash command that the user typed. `command` is None if the typed name is unknown."""

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


async def run(screen: ChatScreen, typed: Typed) -> None:
    """Run a typed slash command. Raises OptionError if the command or its argument is invalid."""
    if typed.command is None:
        raise unknown(typed)
    if isinstance(typed.command.run, str):
        await screen.run_action(typed.command.run)
    else:
        await typed.command.run(screen, typed.argument)


def unknown(typed: Typed) -> OptionError:
    """Return the error for a command with an unknown name."""
    near = nearest(typed.name)
    suggestion = f"Did you mean /{near}?" if near else "Type /help for all commands."
    return OptionError(
        f"Unknown command /{typed.name}",
        f"{suggestion} To send this as a message, type a space first",
    )


def nearest(name: str) -> str:
    """Return the command name most similar to `name`. Empty if none is similar."""
    close = spelling.nearest(name, _BY_NAME)
    return _BY_NAME[close[0]].name if close else ""


def completion(text: str) -> str:
    """Return the rest of a partially typed command name, or an empty string if nothing matches."""
    if not text.startswith("/") or len(text) < 2:
        return ""
    names = (
        name for name in (*(command.name for command in COMMANDS), *_BY_NAME) if name.startswith(text[1:])
    )
    return next(names, text[1:])[len(text) - 1 :]


def typed_path(text: str) -> tuple[str, int] | None:
    """Return the path that is being typed as the argument of a command, and the column where it starts."""
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
            matching = [each for name, each in _BY_NAME.items() if name.startswith(typed.name)]
        if len(matching) > 1:
            return _names(matching, width)
        command = matching[0] if matching else None
    if command is None:
        return ""
    usage = f"/{command.name} {command.arguments}".rstrip()
    described = f"{usage} · {command.help}"
    return described if len(described) <= width else usage


def _names(matching: Sequence[Command], width: int) -> str:
    """Return as many command names as fit in `width` cells."""
    names = [f"/{command.name}" for command in matching]
    shown = " ".join(names)
    while len(shown) > width and names:
        names.pop()
        shown = " ".join((*names, "… F1 lists all"))
    return shown
