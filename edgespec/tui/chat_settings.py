"""Edit the system prompt and the settings of the open chat in dialogs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import OptionError
from edgespec.tui.commands.setup import system_change
from edgespec.tui.screen_commands import show
from edgespec.tui.screens.dialogs import SystemScreen
from edgespec.tui.screens.settings import SettingsScreen
from edgespec.tui.settings import SCHEMA, check_settings
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["edit_settings", "edit_system"]


async def edit_system(screen: ChatScreen) -> None:
    """Let the user edit the system prompt."""
    text = await screen.app.push_screen_wait(SystemScreen(screen.current_chat.system or ""))
    if text is not None:
        await show(screen, system_change(screen.current_chat, text or None))


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
        check_settings(settings, screen.runtime)
    except OptionError as error:
        await screen.transcript.note(sentences("The settings were not changed", error.what, error.next_step))
        return
    chat.settings = settings
    await screen.transcript.note("The new settings take effect with your next message.")
    await screen.save()
