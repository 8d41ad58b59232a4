"""Change the system prompt and the settings of the open chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgespec.errors import OptionError
from edgespec.tui.screens.dialogs import SystemScreen
from edgespec.tui.screens.settings import SettingsScreen
from edgespec.tui.setting_commands import check_settings
from edgespec.tui.settings import SCHEMA
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.chat.saved_chat import Setting
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["edit_settings", "edit_system", "set_settings", "set_system"]


async def edit_system(screen: ChatScreen) -> None:
    """Let the user edit the system prompt."""
    text = await screen.app.push_screen_wait(SystemScreen(screen.current_chat.system or ""))
    if text is not None:
        await set_system(screen, text or None)


async def set_system(screen: ChatScreen, text: str | None) -> None:
    """Change the system prompt, starting with the next message."""
    if text == screen.current_chat.system:
        return
    screen.current_chat.system = text
    which = "use the new system prompt" if text else "not use a system prompt"
    await screen.transcript.note(f"Your next message will {which}.")
    await screen.save()


async def edit_settings(screen: ChatScreen) -> None:
    """Let the user edit the settings in a form. Keep the schema, which is not part of the form."""
    settings = await screen.app.push_screen_wait(SettingsScreen(screen.current_chat.settings, screen.runtime))
    if settings is None:
        return
    chat = screen.current_chat
    if SCHEMA in chat.settings:
        settings[SCHEMA] = chat.settings[SCHEMA]
    if settings == chat.settings:
        return
    try:
        await set_settings(screen, settings, "The new settings take effect with your next message.")
    except OptionError as error:
        await screen.transcript.note(sentences("The settings were not changed", error.what, error.next_step))


async def set_settings(screen: ChatScreen, settings: Mapping[str, Setting], note: str) -> None:
    """Apply settings from the next message on.

    Args:
        screen: The chat screen.
        settings: All settings of the chat. They replace the current ones.
        note: Message to show to the user.

    Raises:
        OptionError: The loaded models cannot generate replies with these settings.
    """
    check_settings(settings, screen.runtime)
    screen.current_chat.settings = dict(settings)
    await screen.transcript.note(note)
    await screen.save()
