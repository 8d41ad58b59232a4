"""The command `/think`, which turns reasoning before the answer on or off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.chat.saved_chat import Setting
from edgespec.errors import OptionError, TemplateError
from edgespec.tui.chat_settings import set_settings
from edgespec.tui.setting_commands import SettingsChange
from edgespec.tui.settings import parse, shown

if TYPE_CHECKING:
    from edgespec import Runtime
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["think", "thinking_change"]


async def think(screen: ChatScreen, argument: str) -> None:
    """Show or change whether the model reasons before it answers.

    Raises:
        OptionError: `argument` is invalid, or the model's reasoning cannot be turned on or off.
    """
    # Run in a thread, because starting the template's process would block the screen.
    change = await asyncio.to_thread(thinking_change, argument, screen.current_chat.settings, screen.runtime)
    if change.settings is None:
        await screen.transcript.note(change.note)
    else:
        await set_settings(screen, change.settings, change.note)


def thinking_change(argument: str, current: Mapping[str, Setting], runtime: Runtime) -> SettingsChange:
    """Return the result of `/think on`, `/think off`, `/think auto` or `/think`.

    Raises:
        OptionError: `argument` is invalid, or the model's reasoning cannot be turned on or off.
    """
    settings = dict(current)
    if not argument:
        value = shown(settings["thinking"]) if "thinking" in settings else "auto, the model's default"
        return SettingsChange(None, f"Reasoning: {value}. Type /think on or /think off to change it.")
    value = str(parse("thinking", argument.lower()))
    if value != "auto":
        _check_thinking_switch(runtime)
    settings.pop("thinking", None)
    note = "From your next message on, the model decides whether to reason before it answers."
    if value != "auto":
        settings["thinking"] = value
        note = (
            f"From your next message on, the model will be asked {'' if value == 'on' else 'not '}to reason."
        )
    return SettingsChange(settings, note)


def _check_thinking_switch(runtime: Runtime) -> None:
    """Raise OptionError if the model's chat template has no option that turns reasoning on or off."""
    template, switch = runtime.template, False
    # Treat a broken template as one without the option. The next message reports the template's error.
    with suppress(TemplateError):
        switch = template is not None and template.has_thinking_switch()
    if not switch:
        raise OptionError(
            f"Reasoning cannot be turned on or off for the model {runtime.target.name}",
            "Models that support /think include Qwen 3, GLM 4.5 and SmolLM3",
        )
