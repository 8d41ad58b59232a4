"""The functions that run the slash commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from edgespec.errors import OptionError
from edgespec.tui.commands import Typed, nearest
from edgespec.tui.settings import default_text, field_named, parse, shown
from edgespec.tui.texts import memory_rows, not_set, show_rows
from edgespec.tui.widgets.messages import Panel
from edgespec.tui.widgets.pairs import Pairs

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["run_command"]


async def run_command(screen: ChatScreen, typed: Typed) -> bool:
    """Run a typed slash command. Return False if it failed, so that its text stays in the input."""
    if typed.command is None:
        await screen.transcript.note(
            f"There is no /{typed.name}. Did you mean /{nearest(typed.name)}? "
            "To send it as a message, put a blank in front."
        )
        # With the text selected, typing replaces it.
        screen.prompt.select_all()
        return False
    return await _ACTIONS[typed.command.name](screen, typed.argument)


async def _help(screen: ChatScreen, _argument: str) -> bool:
    screen.action_help()
    return True


async def _new(screen: ChatScreen, _argument: str) -> bool:
    await screen.action_new_chat()
    return True


async def _clear(screen: ChatScreen, _argument: str) -> bool:
    await screen.action_clear()
    return True


async def _regen(screen: ChatScreen, _argument: str) -> bool:
    await screen.action_regenerate()
    return True


async def _edit(screen: ChatScreen, _argument: str) -> bool:
    await screen.action_edit_last()
    return True


async def _copy(screen: ChatScreen, argument: str) -> bool:
    part = argument.lower()
    if part in ("code", "block"):
        await screen.action_copy_code()
    elif part in ("chat", "all"):
        await screen.copy(screen.current_chat.as_markdown(), "chat")
    elif part in ("", "reply", "last"):
        await screen.action_copy_reply()
    else:
        await screen.transcript.note(
            "/copy copies the last reply, /copy code its last code block, /copy chat the whole chat."
        )
        return False
    return True


async def _system(screen: ChatScreen, argument: str) -> bool:
    if not argument:
        screen.action_system()
    else:
        await screen.set_system(None if argument.lower() == "none" else _unquoted(argument))
    return True


async def _set(screen: ChatScreen, argument: str) -> bool:
    # Ollama's syntax works too: /set parameter temperature 0.5, /set system "Be brief."
    words = argument.removeprefix("parameter ").replace("=", " ", 1).split(maxsplit=1)
    if not words:
        screen.action_settings()
        return True
    name, text = words[0], words[1] if len(words) == 2 else ""
    if name == "system":
        return await _system(screen, text)
    try:
        field = field_named(name)
        if not text:
            current = screen.current_chat.settings.get(field.name)
            value = f"{default_text(field)} (default)" if current is None else shown(current)
            await screen.transcript.note(
                f"{field.name} is {value}. {field.hint[:1].upper()}{field.hint[1:]}."
            )
            return True
        settings = dict(screen.current_chat.settings)
        if text.lower() in ("default", "none", "off") and not (field.name == "method" and text == "none"):
            settings.pop(field.name, None)
            note = f"{field.name} is back to its default, {default_text(field)}."
        else:
            settings[field.name] = parse(field, _unquoted(text))
            note = f"{field.name} is now {shown(settings[field.name])}."
    except OptionError as error:
        await screen.transcript.note(not_set(error))
        return False
    return await screen.set_settings(settings, note)


async def _show(screen: ChatScreen, _argument: str) -> bool:
    await screen.transcript.add(
        Panel(
            "In use",
            Pairs(
                show_rows(screen.runtime, screen.current_chat, screen.method, screen.stats), stack_below=24
            ),
        )
    )
    return True


async def _memory(screen: ChatScreen, _argument: str) -> bool:
    rows = memory_rows(screen.runtime.memory())
    await screen.transcript.add(Panel("Memory", Pairs(rows, stack_below=24)))
    return True


async def _save(screen: ChatScreen, argument: str) -> bool:
    await screen.save_as(_unquoted(argument))
    return True


async def _load(screen: ChatScreen, argument: str) -> bool:
    if argument:
        return await screen.open_by_title(_unquoted(argument))
    await screen.show_chats()
    return True


async def _details(screen: ChatScreen, _argument: str) -> bool:
    await screen.action_details()
    return True


async def _colours(screen: ChatScreen, _argument: str) -> bool:
    screen.action_origin()
    return True


async def _theme(screen: ChatScreen, argument: str) -> bool:
    theme = argument.lower()
    if theme not in ("", "light", "dark"):
        await screen.transcript.note("The themes are light and dark.")
        return False
    if not theme or (theme == "light") != screen.preferences.light:
        screen.action_theme()
    return True


async def _quit(screen: ChatScreen, _argument: str) -> bool:
    await screen.app.run_action("quit")
    return True


def _unquoted(text: str) -> str:
    for quotes in ('"""', '"', "'"):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)].strip()
    return text


_Action = Callable[["ChatScreen", str], Awaitable[bool]]
_ACTIONS: dict[str, _Action] = {
    "help": _help,
    "new": _new,
    "clear": _clear,
    "regen": _regen,
    "edit": _edit,
    "copy": _copy,
    "system": _system,
    "set": _set,
    "show": _show,
    "memory": _memory,
    "save": _save,
    "load": _load,
    "details": _details,
    "colours": _colours,
    "theme": _theme,
    "quit": _quit,
}
