"""Commands about the look of the full-screen chat."""

from __future__ import annotations

from edgespec.errors import ConfigurationError, OptionError
from edgespec.tui.commands.results import Action, Command, Context, Result, Text

__all__ = ["COMMANDS"]


def _colours(_context: Context) -> Result:
    return Action("colours")


def _theme(context: Context) -> Result:
    # Imported only when used, because the plain chat does not need Textual.
    from edgespec.tui.themes import find_theme, theme_names, themes_folder

    if not context.argument:
        used = context.preferences.theme
        names = ", ".join(f"{name} (in use)" if name == used else name for name in theme_names())
        return Text(
            f"Themes: {names}. Type /theme NAME to choose one. Your own themes are TOML files in"
            f" {themes_folder()}."
        )
    try:
        find_theme(context.argument)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step, code=error.code) from error
    return Action("theme", context.argument)


COMMANDS = (
    Command(
        "colours",
        "",
        "colour the words that were guessed correctly",
        _colours,
        ("colors", "origin"),
        instead="Type /why to see how many guesses were accepted",
    ),
    Command(
        "theme",
        "[name]",
        "list the colour themes, or choose one",
        _theme,
        instead="The plain chat uses the colours of your terminal",
    ),
)
