"""The command `/think`, which asks the model to reason before it answers, or not to."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.errors import OptionError, TemplateError
from edgespec.tui.chat_settings import set_settings
from edgespec.tui.settings import parse, shown

if TYPE_CHECKING:
    from edgespec import Runtime
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["think"]


async def think(screen: ChatScreen, argument: str) -> None:
    """Show or change whether the model reasons before it answers.

    Raises:
        OptionError: `argument` is invalid, or the model has no switch for reasoning.
    """
    settings = dict(screen.current_chat.settings)
    wanted = argument.lower()
    if not wanted:
        value = shown(settings["thinking"]) if "thinking" in settings else "auto, the model's default"
        await screen.transcript.note(f"Reasoning: {value}. Type /think on or /think off to change it.")
        return
    value = str(parse("thinking", wanted))
    if value != "auto":
        await _check_thinking_switch(screen.runtime)
    settings.pop("thinking", None)
    note = "The model decides again whether it reasons before it answers."
    if value != "auto":
        settings["thinking"] = value
        note = f"From your next message on, the model is asked {'' if value == 'on' else 'not '}to reason."
    await set_settings(screen, settings, note)


async def _check_thinking_switch(runtime: Runtime) -> None:
    """Raise OptionError if users of the model cannot choose whether it reasons."""
    template, switch = runtime.template, False
    # A broken template has no switch. The next message reports what is wrong with it.
    with suppress(TemplateError):
        # Use a thread, because the template runs in its own process, which may have to be started.
        switch = template is not None and await asyncio.to_thread(template.has_thinking_switch)
    if not switch:
        raise OptionError(
            f"The model {runtime.target.name} has no switch for reasoning, so /think cannot change it",
            "Models that have one include Qwen 3, GLM 4.5 and SmolLM3",
        )
