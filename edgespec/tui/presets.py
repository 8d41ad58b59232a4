"""The command `/preset`, which applies a saved system prompt and settings, or saves the current ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from edgespec.errors import ConfigurationError, OptionError
from edgespec.presets import Preset, preset_names, preset_path, read_preset, write_preset
from edgespec.tui.chat_settings import set_settings
from edgespec.tui.model_choice import choose_model
from edgespec.tui.preset_values import NO_PRESETS, preset_from_chat, preset_values, saved_text
from edgespec.tui.screens.dialogs import ConfirmScreen
from edgespec.tui.screens.presets import PresetScreen
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
        await screen.transcript.note(NO_PRESETS)


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
    values = await asyncio.to_thread(preset_values, name, screen.current_chat)
    await set_settings(screen, values.settings, f"The preset {name} takes effect with your next message.")
    screen.current_chat.system = values.system
    await screen.save()
    if values.remark:
        await screen.transcript.note(values.remark)
    if values.target and values.target != screen.model_name:
        await choose_model(screen, values.target)


def _save(screen: ChatScreen, name: str) -> None:
    """Save the current system prompt, model and settings. Raises OptionError if the name is invalid."""
    preset = preset_from_chat(name, screen.current_chat, screen.model_name)
    screen.run_worker(_write(screen, preset, exists=preset_path(name).exists()))


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
    await screen.transcript.note(saved_text(name, path, screen.current_chat))
