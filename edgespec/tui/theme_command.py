"""The command `/theme`, which lists the colour themes and chooses one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import ConfigurationError, OptionError
from edgespec.tui.user_themes import find_theme, theme_names, themes_folder

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["choose_theme"]


async def choose_theme(screen: ChatScreen, argument: str) -> None:
    """Use the theme named `argument`, or list the themes if it is empty.

    Raises:
        OptionError: There is no such theme, or its file is invalid.
    """
    if not argument:
        used = screen.preferences.theme
        names = ", ".join(f"{name} (in use)" if name == used else name for name in theme_names())
        await screen.transcript.note(
            f"Themes: {names}. Type /theme NAME to choose one. Your own themes are TOML files in"
            f" {themes_folder()}."
        )
        return
    try:
        find_theme(argument)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step) from error
    screen.preferences.theme = argument
    screen.post_message(screen.PreferencesChanged())
