"""Run slash commands in the full-screen chat, show their results, and open the dialogs that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from edgespec.chat.store import StoredChat
from edgespec.errors import EdgespecError, OptionError
from edgespec.system.files import format_bytes
from edgespec.tui import selection
from edgespec.tui.background import in_thread
from edgespec.tui.commands import table
from edgespec.tui.commands.chats import import_file, renamed
from edgespec.tui.commands.results import (
    Action,
    Change,
    Command,
    Context,
    Copy,
    Generate,
    Load,
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
from edgespec.tui.commands.setup import check_load_setting, chosen_model, system_change
from edgespec.tui.desktop import copy_text, show_message
from edgespec.tui.downloads import Download
from edgespec.tui.model_choice import kept_options
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.saved_chats import open_chat, open_new, restore_chat
from edgespec.tui.screens.dialogs import (
    ConfirmScreen,
    PresetScreen,
    RenameScreen,
    SettingsScreen,
    SystemScreen,
    all_presets,
)
from edgespec.tui.screens.models import ModelsScreen
from edgespec.tui.settings import SCHEMA, check_settings, with_load_setting
from edgespec.tui.texts import sentences
from edgespec.tui.turns import TurnScreen
from edgespec.tui.widgets.messages import Pairs, Panel

_Do: TypeAlias = Callable[[TurnScreen, str], object]
_DOWNLOAD_TICK_SECONDS = 0.2


async def run(screen: TurnScreen, typed: table.Typed) -> None:
    """Run a typed slash command. Raises OptionError if the command or its argument is invalid."""
    if typed.command is None:
        raise table.unknown(typed)
    await _run(screen, typed.command, typed.argument)


async def run_named(screen: TurnScreen, name: str, argument: str = "") -> None:
    """Run a command for a key or a dialog. Raises OptionError if the argument is invalid."""
    await _run(screen, next(each for each in table.COMMANDS if each.name == name), argument)


async def _run(screen: TurnScreen, command: Command, argument: str) -> None:
    work = partial(command.run, _context(screen, argument))
    try:
        if command.slow == "reads":
            result = await in_thread(work)
        elif command.slow == "writes":
            result = await asyncio.to_thread(work)
        else:
            result = work()
        await _show(screen, result)
    except OptionError:
        raise
    except EdgespecError as error:
        await screen.show_error(error)


def _context(screen: TurnScreen, argument: str) -> Context:
    return Context(
        argument=argument,
        chat=screen.current_chat,
        new_chat=OpenChat(screen.first_system, dict(screen.first_settings)),
        runtime=screen.runtime,
        model_name=screen.models.target,
        changed_load_options=screen.changed_load_options,
        model_paths=screen.model_paths,
        model_thread=screen.model_thread,
        method=screen.method,
        stats=screen.stats,
        writing=screen.writing,
        archive=screen.archive,
        tools=screen.tool_use,
        preferences=screen.preferences,
        list_hint="Press F2 for the list of chats",
    )


async def _show(screen: TurnScreen, result: Result) -> None:
    """Show a command's result, or perform the action that it requests.

    Raises:
        OptionError: The result cannot be shown, or the action cannot be performed.
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
            case Load():
                screen.load_model(part.reference, part.changed, is_other=part.is_other)
            case Copy():
                screen.say(await copy_text(screen.app, part.text, part.name))
            case Question():
                screen.run_worker(_ask(screen, part))
            case RunningRace():
                await _show_race(screen, part)
            case Action():
                done = ACTIONS[part.name](screen, part.value)
                if isinstance(done, Awaitable):
                    await done


async def _show_text(screen: TurnScreen, text: Text) -> None:
    if text.title:
        await screen.transcript.show_panel(Panel(text.title, text.text))
    elif text.text:
        await screen.transcript.note(text.text)


async def _change(screen: TurnScreen, change: Change) -> None:
    change.apply(screen.current_chat)
    if not change.is_brief:
        if change.text:
            await screen.transcript.note(change.text)
            await screen.save()
    elif await screen.save(show_again=True):
        screen.refresh_facts()
        screen.say(change.text)


async def _generate(screen: TurnScreen, generate: Generate) -> None:
    if screen.holds_waiting:
        if not screen.is_leaving:
            screen.waiting.add(generate.command)
        return
    started = generate.start(screen.current_chat)
    if isinstance(started, RunningTurn):
        await screen.take_turn(started)
    elif started:
        screen.tool_use.begin(started)


async def _ask(screen: TurnScreen, question: Question) -> None:
    if not await screen.app.push_screen_wait(ConfirmScreen(question.question, question.confirm)):
        return
    try:
        await _show(screen, await asyncio.to_thread(question.then))
    except EdgespecError as error:
        await screen.show_error(error)


async def _show_race(screen: TurnScreen, running: RunningRace) -> None:
    # Imported lazily to avoid delaying the first screen.
    from edgespec.tui.screens.race import RaceScreen

    def closed(_result: None) -> None:
        screen.call_later(screen.use_reloaded_model)

    await screen.app.push_screen(RaceScreen(running, screen.model_thread.cancel), closed)


async def _choose_preset(screen: TurnScreen) -> None:
    name = await screen.app.push_screen_wait(PresetScreen(await asyncio.to_thread(all_presets)))
    if name is None:
        return
    try:
        await run_named(screen, "preset", name)
    except OptionError as error:
        await screen.transcript.note(sentences(error.what, error.next_step))


async def pick_model(screen: TurnScreen, typed: str = "") -> None:
    """Let the user choose from the list of models, then switch to the model or download it.

    Args:
        screen: The chat screen.
        typed: Initial text of the list's filter.
    """
    model = await screen.app.push_screen_wait(
        ModelsScreen(
            screen.runtime,
            screen.plan_model,
            screen.downloads,
            paths=screen.model_paths,
            kept=kept_options(screen.changed_load_options),
            is_writing=screen.writing,
            typed=typed,
        )
    )
    if model is None:
        return
    if not model.is_installed:
        own_bytes = model.size_bytes + model.projector_bytes
        draft_bytes = max(0, model.download_bytes - own_bytes) if model.draft else 0
        share = draft_bytes / max(model.download_bytes, 1)
        draft = model.draft if draft_bytes else ""
        await _start_download(screen, Download(model.reference, draft, share, model))
        return
    try:
        await _use_model(screen, model.reference)
    except OptionError as error:
        await screen.show_error(error)


async def _use_model(screen: TurnScreen, reference: str) -> None:
    await _show(screen, await asyncio.to_thread(chosen_model, screen.runtime, reference))


async def _start_download(screen: TurnScreen, download: Download) -> None:
    """Start a download, and show its result when it ends."""
    name, model = download.reference, download.model
    if screen.downloads.is_running(name):
        await screen.transcript.note(f"{name} is already being downloaded. Press F9 to see the progress.")
        return
    screen.downloads.start(download)
    size = f" ({format_bytes(model.download_bytes)})" if model and model.download_bytes else ""
    await screen.transcript.note(
        f"Downloading {name}{size} in the background. You can keep chatting. Press F9 to stop it."
    )
    screen.run_worker(_watch_download(screen, download))


async def _watch_download(screen: TurnScreen, download: Download) -> None:
    while not download.ended.is_set():
        screen.refresh_facts(details=False)
        await asyncio.sleep(_DOWNLOAD_TICK_SECONDS)
    screen.refresh_facts(details=False)
    name, error = download.reference, download.error
    if error is None:
        text = f"{name} is downloaded. To switch to it, type /model {name}"
    elif download.cancelled.is_set():
        text = f"The download of {name} was stopped. To resume it, type /model {name}"
    elif isinstance(error, EdgespecError):
        text = sentences(f"{name} was not downloaded: {error.what}", error.next_step)
    else:
        text = f"{name} was not downloaded: {type(error).__name__}: {error}."
    await screen.transcript.note(" ".join(text.split()))


async def edit_system(screen: TurnScreen) -> None:
    """Let the user edit the system prompt."""
    text = await screen.app.push_screen_wait(SystemScreen(screen.current_chat.system or ""))
    if text is not None:
        await _show(screen, system_change(screen.current_chat, text or None))


async def edit_settings(screen: TurnScreen) -> None:
    """Let the user edit the settings in a form. Keep the schema, which is not part of the form."""
    edited = await screen.app.push_screen_wait(
        SettingsScreen(screen.current_chat.settings, screen.changed_load_options, screen.runtime)
    )
    if edited is None:
        return
    chat, settings = screen.current_chat, edited.replies
    if SCHEMA in chat.settings:
        settings[SCHEMA] = chat.settings[SCHEMA]
    try:
        needed = check_settings(settings, screen.runtime)
        changed = {**screen.changed_load_options, **needed}
        for name, text in edited.loading.items():
            await in_thread(partial(check_load_setting, name, text))
            changed = with_load_setting(changed, name, text)
    except OptionError as error:
        await screen.transcript.note(sentences("The settings were not changed", error.what, error.next_step))
        return
    if settings != chat.settings:
        chat.settings = settings
        await screen.transcript.note("The new settings take effect with your next message.")
        await screen.save()
    if edited.loading or needed:
        screen.load_model(screen.models.target, changed)


async def _rename(screen: TurnScreen) -> None:
    """Prompt for a new title, and rename the open chat."""
    typed = await screen.app.push_screen_wait(RenameScreen(screen.current_chat.shown_title))
    if typed is not None:
        await _show(screen, renamed(screen.current_chat, typed))


async def _delete(screen: TurnScreen) -> None:
    async def begin() -> None:
        # A message becomes part of the chat only when its reply has ended or stopped.
        if (place := screen.current_chat.last_place("user")) is not None:
            await selection.delete(screen, place)

    await screen.when_free(begin)


def _read_reply(screen: TurnScreen) -> None:
    if (reply := screen.current_chat.last_reply) is not None:
        show_message(screen.app, reply.message)


def _theme(screen: TurnScreen, name: str) -> None:
    screen.preferences.theme = name
    screen.post_message(screen.PreferencesChanged())


async def _import(screen: TurnScreen, path: str) -> None:
    # Use a thread, because an import can take minutes and must not block the screen.
    screen.say(f"Importing the chats in {Path(path).name}…")
    hint = "Press F2 for the list of chats."
    await _show(screen, await asyncio.to_thread(import_file, screen.archive, path, hint))


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
    # What waits for the user or takes long runs in a worker, so that it does not block key handling.
    "models": lambda screen, typed: screen.run_worker(pick_model(screen, typed)),
    "presets": lambda screen, _: screen.run_worker(_choose_preset(screen)),
    "rename": lambda screen, _: screen.run_worker(_rename(screen)),
    "delete": lambda screen, _: _delete(screen),
    "undo": lambda screen, _: selection.undo(screen),
    "restore_chat": lambda screen, _: restore_chat(screen),
    "read_reply": lambda screen, _: _read_reply(screen),
    "theme": _theme,
    "use_model": _use_model,
    "download": lambda screen, reference: _start_download(screen, Download(reference)),
    "switch": lambda screen, reference: screen.load_model(reference),
    "tools": lambda screen, _: screen.tool_use.show_servers(),
    "start_tools": lambda screen, _: screen.run_worker(screen.tool_use.start_servers()),
    "stop_tools": lambda screen, _: screen.tool_use.stop_servers(),
    "import": lambda screen, path: screen.run_worker(_import(screen, path)),
    "list_changed": lambda screen, _: screen.refresh_sidebar(),
}
"""The full-screen chat's implementations of command actions, keyed by `Action.name`."""
