"""The user's colour themes: TOML files in the folder `themes` of edgespec's configuration folder."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.color import Color, ColorParseError
from textual.theme import Theme

from edgespec.errors import OptionError
from edgespec.files import config_folder
from edgespec.settings_file import error_at, read_text
from edgespec.spelling import nearest
from edgespec.tui.themes import DARK, LIGHT, THEMES

__all__ = ["find_theme", "theme_names", "themes_folder"]

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,39}", re.ASCII)
_COLOURS = (
    *("primary", "secondary", "warning", "error", "success", "accent"),
    *("foreground", "background", "surface", "panel", "boost"),
)


def theme_names() -> list[str]:
    """Return the names of the built-in themes, then those of the user's themes, including invalid ones."""
    try:
        stems = sorted(path.stem for path in themes_folder().iterdir() if path.suffix == ".toml")
    except OSError:
        stems = []
    return [*THEMES, *(stem for stem in stems if _NAME.fullmatch(stem) and stem not in THEMES)]


def find_theme(name: str) -> Theme:
    """Return the theme with this name.

    Raises:
        ConfigurationError: The theme's file is invalid. The message names the file and the line.
        OptionError: There is no such theme.
    """
    if name in THEMES:
        return THEMES[name]
    path = themes_folder() / f"{name}.toml"
    text = read_text(path) if _NAME.fullmatch(name) else None
    if text is None:
        near = nearest(name, theme_names())
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise OptionError(
            f"there is no theme {name[:60]!r}",
            f"{meant}Themes: {', '.join(theme_names())}. Your own are TOML files in {themes_folder()}",
        )
    return _theme(name, path, text)


def themes_folder() -> Path:
    """Return the folder of the user's themes. It may not exist."""
    return config_folder() / "themes"


def _theme(name: str, path: Path, text: str) -> Theme:
    given = tomllib.loads(text)
    dark = given.pop("dark", True)
    if not isinstance(dark, bool):
        raise error_at(
            path, text, ("dark",), f"'dark' must be true or false, not {dark!r}", "change this line"
        )
    base = DARK if dark else LIGHT
    variables = given.pop("variables", {})
    if not isinstance(variables, dict):
        raise error_at(path, text, ("variables",), "'variables' must be a table", "write it as [variables]")
    for key, value in given.items():
        if key not in _COLOURS:
            near = nearest(key, (*_COLOURS, "dark", "variables"))
            advice = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(_COLOURS)}"
            raise error_at(path, text, (key,), f"themes have no colour named {key[:60]!r}", advice)
        _check_colour(path, text, (key,), value)
    for key, value in variables.items():
        if key not in base.variables:
            near = nearest(key, base.variables)
            advice = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(base.variables)}"
            raise error_at(
                path, text, ("variables", key), f"themes have no variable named {key[:60]!r}", advice
            )
        if key != "block-cursor-text-style":
            _check_colour(path, text, ("variables", key), value)
    return replace(base, name=f"user-{name}", dark=dark, variables={**base.variables, **variables}, **given)


def _check_colour(path: Path, text: str, keys: tuple[str, ...], value: Any) -> None:
    try:
        if not isinstance(value, str):
            raise ColorParseError("not a string")
        Color.parse(value)
    except ColorParseError:
        raise error_at(
            path, text, keys, f"'{keys[-1]}' is {value!r}, which is not a colour", 'write it as "#7aa2c8"'
        ) from None
