"""Run slash commands in the full-screen chat, and show their results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec.chat.store import StoredChat
from edgespec.errors import EdgespecError, OptionError
from edgespec.tui import selection
from edgespec.tui.background import in_thread
from edgespec.tui.chat_list import restore_chat
from edgespec.tui.commands import table
from edgespec.tui.commands.chats import renamed
from edgespec.tui.commands.results import (
    Action,
    Change,
    Command,
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
from edgespec.tui.copying import copy_text
from edgespec.tui.downloads import Download
from edgespec.tui.editor import show_message
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.saved_chats import open_chat, open_new
from edgespec.tui.screen_downloads import start_download
from edgespec.tui.screens.dialogs import ConfirmScreen, RenameScreen
from edgespec.tui.screens.models import ModelsScreen
from edgespec.tui.screens.presets import PresetScreen, all_presets
from edgespec.tui.texts import sentences
from edgespec.tui.widgets.messages import Panel
from edgespec.tui.widgets.pairs import Pairs

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["ACTIONS", "pick_model", "run", "run_named", "show"]

_Do: TypeAlias = Callable[["ChatScreen", str], Awaitable[object]]


async def run(screen: ChatScreen, typed: table.Typed) -> None:
    """Run a typed slash command. Raises OptionError if the command or its argument is invalid."""
    if typed.command is None:
        raise table.unknown(typed)
    await _run(screen, typed.command, typed.argument)


async def run_named(screen: ChatScreen, name: str, argument: str = "") -> None:
    """Run a command for a key or a dialog. Raises OptionError if the argument is invalid."""
    await _run(screen, next(each for each in table.COMMANDS if each.name == name), argument)


async def _run(screen: ChatScreen, command: Command, argument: str) -> None:
    work = partial(command.run, screen.command_context(argument))
    try:
        if command.slow == "reads":
            result = await in_thread(work)
        elif command.slow == "writes":
            result = await asyncio.to_thread(work)
        else:
            result = work()
        await show(screen, result)
    except OptionError:
        raise
    except EdgespecError as error:
        await screen.show_error(error)


async def show(screen: ChatScreen, result: Result) -> None:
    """Show the result of a command, or do what it says.

    Raises:
        OptionError: That is not possible.
    """
    for part in all_of(result):
        match part:
            case Text():
                await _show_text(screen, part)
            case Table():
                await screen.transcript.show_panel(Panel(part.title, Pairs(part.rows, stack_below=24)))
            case Nothing():
                (screen.say_while_writing if screen.writing else screen.say)(sentences(part.reason))
            case Problem():
                await screen.show_error(part.error)
            case Change():
                await _change(screen, part)
            case Open(chat=StoredChat() as stored):
                await open_chat(screen, stored)
            case Open(chat=OpenChat() as new):
                await open_new(screen, new, part.note)
            case Generate():
                await screen.when_free(partial(_generate, screen, part))
            case Copy():
                await copy_text(screen, part.text, part.name)
            case Question():
                screen.run_worker(_ask(screen, part))
            case RunningRace():
                await _show_race(screen, part)
            case Action():
                await ACTIONS[part.name](screen, part.value)


async def _show_text(screen: ChatScreen, text: Text) -> None:
    if text.title:
        await screen.transcript.show_panel(Panel(text.title, text.text))
    elif text.text:
        await screen.transcript.note(text.text)


async def _change(screen: ChatScreen, change: Change) -> None:
    change.apply(screen.current_chat)
    if not change.is_brief:
        if change.text:
            await screen.transcript.note(change.text)
            await screen.save()
    elif await screen.save(show_again=True):
        screen.refresh_facts()
        screen.say(change.text)


async def _generate(screen: ChatScreen, generate: Generate) -> None:
    started = generate.start(screen.current_chat)
    if isinstance(started, RunningTurn):
        await screen.take_turn(started)
    elif started:
        screen.tool_use.begin(started)


async def _ask(screen: ChatScreen, question: Question) -> None:
    if not await screen.app.push_screen_wait(ConfirmScreen(question.question, question.confirm)):
        return
    try:
        await show(screen, await asyncio.to_thread(question.then))
    except EdgespecError as error:
        await screen.show_error(error)


async def _show_race(screen: ChatScreen, running: RunningRace) -> None:
    # Imported only when used, because this import would delay the first screen.
    from edgespec.tui.screens.race import RaceScreen

    await screen.app.push_screen(RaceScreen(*running.race, screen.model_thread.cancel))


async def _choose_preset(screen: ChatScreen) -> None:
    name = await screen.app.push_screen_wait(PresetScreen(await asyncio.to_thread(all_presets)))
    if name is None:
        return
    try:
        await run_named(screen, "preset", name)
    except OptionError as error:
        await screen.transcript.note(sentences(error.what, error.next_step))


async def pick_model(screen: ChatScreen, typed: str = "") -> None:
    """Let the user choose from the list of models, then switch to the model or download it.

    Args:
        screen: The chat screen.
        typed: Initial text of the list's filter.
    """
    model = await screen.app.push_screen_wait(
        ModelsScreen(
            screen.runtime, screen.plan_model, screen.downloads, is_writing=screen.writing, typed=typed
        )
    )
    if model is None:
        return
    if not model.is_installed:
        draft_bytes = max(0, model.download_bytes - model.size_bytes) if model.draft else 0
        share = draft_bytes / max(model.download_bytes, 1)
        draft = model.draft if draft_bytes else ""
        await start_download(screen, Download(model.reference, draft, share, model))
        return
    try:
        await _use_model(screen, model.reference)
    except OptionError as error:
        await screen.show_error(error)


async def _use_model(screen: ChatScreen, reference: str) -> None:
    await show(screen, await asyncio.to_thread(chosen_model, screen.runtime, reference))


async def _rename(screen: ChatScreen) -> None:
    """Ask for a new title of the open chat, and save it under this title."""
    typed = await screen.app.push_screen_wait(RenameScreen(screen.current_chat.shown_title))
    if typed is not None:
        await show(screen, renamed(screen.current_chat, typed))


async def _delete(screen: ChatScreen) -> None:
    if (place := screen.current_chat.last_place("user")) is not None:
        await selection.delete(screen, place)


async def _read_reply(screen: ChatScreen) -> None:
    if (reply := screen.current_chat.last_reply) is not None:
        show_message(screen, reply.message)


async def _theme(screen: ChatScreen, name: str) -> None:
    screen.preferences.theme = name
    screen.post_message(screen.PreferencesChanged())


async def _switch(screen: ChatScreen, reference: str) -> None:
    screen.post_message(screen.ModelChosen(reference))


async def _show_tools(screen: ChatScreen, _value: str) -> None:
    screen.tool_use.show_servers()


async def _in_background(screen: ChatScreen, work: Coroutine[Any, Any, None]) -> None:
    """Start work that waits for the user, so that the screen handles keys meanwhile."""
    screen.run_worker(work)


ACTIONS: dict[str, _Do] = {
    "help": lambda screen, _: screen.run_action("help"),
    "settings": lambda screen, _: screen.run_action("settings"),
    "system": lambda screen, _: screen.run_action("system"),
    "details": lambda screen, _: screen.run_action("details"),
    "colours": lambda screen, _: screen.run_action("origin"),
    "edit": lambda screen, _: screen.run_action("edit_last"),
    "copy_code": lambda screen, _: screen.run_action("copy_code"),
    "quit": lambda screen, _: screen.run_action("app.quit"),
    "chats": lambda screen, query: screen.show_chats(query),
    "models": lambda screen, typed: _in_background(screen, pick_model(screen, typed)),
    "presets": lambda screen, _: _in_background(screen, _choose_preset(screen)),
    "rename": lambda screen, _: _in_background(screen, _rename(screen)),
    "delete": lambda screen, _: _delete(screen),
    "undo": lambda screen, _: selection.undo(screen),
    "restore_chat": lambda screen, _: restore_chat(screen),
    "read_reply": lambda screen, _: _read_reply(screen),
    "theme": _theme,
    "use_model": _use_model,
    "download": lambda screen, reference: start_download(screen, Download(reference)),
    "switch": _switch,
    "tools": _show_tools,
    "start_tools": lambda screen, _: _in_background(screen, screen.tool_use.start_servers()),
    "stop_tools": lambda screen, _: screen.tool_use.stop_servers(),
    "list_changed": lambda screen, _: screen.refresh_sidebar(),
}
"""What the full-screen chat does for the actions of commands."""
