"""The command `/preset`, which applies a saved system prompt and settings, or saves the current ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from edgespec.errors import ConfigurationError, OptionError
from edgespec.presets import Preset, preset_names, preset_path, read_preset, write_preset
from edgespec.tui.chat_settings import set_settings
from edgespec.tui.model_choice import choose_model
from edgespec.tui.screens.dialogs import ConfirmScreen
from edgespec.tui.screens.presets import PresetScreen
from edgespec.tui.settings import SCHEMA, SETTINGS, accepted
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["preset"]


async def preset(screen: ChatScreen, argument: str) -> None:
    """Apply the preset named `argument`, or let the user choose one. `save NAME` saves a preset.

    Raises:
        OptionError: There is no such preset, or its file cannot be read or written.
    """
    word, _, name = argument.partition(" ")
    if word == "save":
        _save(screen, name.strip())
    elif argument:
        await _apply(screen, argument)
    elif preset_names():
        screen.run_worker(_choose(screen))
    else:
        await screen.transcript.note(
            "There are no presets yet. Type /preset save NAME to save the current system prompt, model and"
            " settings under a name."
        )


async def _choose(screen: ChatScreen) -> None:
    presets = await asyncio.to_thread(_all_presets)
    name = await screen.app.push_screen_wait(PresetScreen(presets))
    if name is None:
        return
    try:
        await _apply(screen, name)
    except OptionError as error:
        await screen.transcript.note(sentences(error.what, error.next_step))


def _all_presets() -> list[Preset | tuple[str, str]]:
    """Return all presets. An invalid preset is returned as its name and a description of the problem."""
    presets: list[Preset | tuple[str, str]] = []
    for name in preset_names():
        try:
            presets.append(read_preset(name))
        except (ConfigurationError, OptionError) as error:
            presets.append((name, error.what))
    return presets


async def _apply(screen: ChatScreen, name: str) -> None:
    """Use a preset from the next message on. Raises OptionError if the preset is invalid or missing."""
    try:
        chosen = await asyncio.to_thread(read_preset, name)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step) from error
    given = dict(chosen.settings)
    system = given.pop("system", None)
    in_chat = {key: _as_chat_value(given.pop(key)) for key in SETTINGS if key in given}
    settings, problems = accepted(in_chat)
    if problems:
        raise OptionError(f"The preset {name} was not applied: {problems[0]}", f"Edit {preset_path(name)}")
    if SCHEMA in screen.current_chat.settings:
        settings[SCHEMA] = screen.current_chat.settings[SCHEMA]
    await set_settings(screen, settings, f"The preset {name} takes effect with your next message.")
    screen.current_chat.system = system or None
    await screen.save()
    target = str(given.pop("target", screen.model_name))
    if given:
        keys = " and ".join(given)
        await screen.transcript.note(
            f"The preset also sets {keys}, which cannot change while a model is loaded. To use that too, quit"
            f" and run: edgespec chat --preset {name}"
        )
    if target != screen.model_name:
        await choose_model(screen, target)


def _as_chat_value(value: object) -> str | int | float | bool | list[str]:
    if isinstance(value, tuple):
        return list(value)
    assert isinstance(value, str | int | float | bool)
    return value


def _save(screen: ChatScreen, name: str) -> None:
    """Save the current system prompt, model and settings. Raises OptionError if the name is invalid."""
    if not name:
        raise OptionError("The preset needs a name", "Type /preset save NAME")
    chat = screen.current_chat
    settings: dict[str, object] = {"system": chat.system} if chat.system else {}
    settings["target"] = screen.model_name
    settings |= {key: value for key, value in chat.settings.items() if key != SCHEMA}
    screen.run_worker(_write(screen, Preset(name, settings), exists=preset_path(name).exists()))


async def _write(screen: ChatScreen, chosen: Preset, *, exists: bool) -> None:
    name = chosen.name
    if exists:
        question = f"Replace the existing preset {name}?"
        if not await screen.app.push_screen_wait(ConfirmScreen(question, "Replace")):
            return
    try:
        path = await asyncio.to_thread(write_preset, chosen)
    except (ConfigurationError, OptionError) as error:
        await screen.show_error(error)
        return
    omitted = (
        " Without the schema, which presets do not contain." if SCHEMA in screen.current_chat.settings else ""
    )
    await screen.transcript.note(
        f"Saved the preset {name} in {path}.{omitted} To use it, type /preset {name}."
    )
