"""Colour themes: the built-in ones and the user's TOML files."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.color import Color, ColorParseError
from textual.css.constants import VALID_STYLE_FLAGS
from textual.theme import Theme

from edgespec.errors import OptionError
from edgespec.options.settings_file import error_at, read_text
from edgespec.system.files import config_folder
from edgespec.system.spelling import nearest

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,39}", re.ASCII)
_TEXT_STYLE = "block-cursor-text-style"
_COLOURS = (
    *("primary", "secondary", "warning", "error", "success", "accent"),
    *("foreground", "background", "surface", "panel", "boost"),
)


def _built_in(*, background: str, muted: str, faint: str, code: str, border: str, **colours: Any) -> Theme:
    scrollbar_parts = ("", "-hover", "-active")
    variables = {"muted": muted, "faint": faint, "code": code, "border-blurred": border, "scrollbar": border}
    variables |= {f"scrollbar-background{part}": background for part in scrollbar_parts}
    return Theme(background=background, variables={**variables, _TEXT_STYLE: "none"}, **colours)


DARK = _built_in(
    name="edgespec-dark",
    dark=True,
    primary="#7aa2c8",
    success="#8ec07c",
    warning="#e5b567",
    error="#e06c75",
    foreground="#d5d8de",
    background="#15171c",
    surface="#1b1e25",
    panel="#20242c",
    muted="#868d9a",
    faint="#3a404c",
    code="#1d2129",
    border="#3a404c",
)
LIGHT = _built_in(
    name="edgespec-light",
    dark=False,
    primary="#2c6392",
    success="#2f7420",
    warning="#9a6200",
    error="#b3362f",
    foreground="#24272d",
    background="#fbfaf7",
    surface="#f3f1eb",
    panel="#eceae2",
    muted="#6a6f78",
    faint="#cfccc2",
    code="#f1efe8",
    border="#cfccc2",
)
# Black, white, and colours with a contrast of at least 7:1 against the background.
HIGH_CONTRAST = _built_in(
    name="edgespec-high-contrast",
    dark=True,
    primary="#6cf0ff",
    success="#5dff5d",
    warning="#ffd83d",
    error="#ff9a9a",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1a1a1a",
    muted="#d8d8d8",
    faint="#8a8a8a",
    code="#1a1a1a",
    border="#d8d8d8",
)

THEMES = {"dark": DARK, "light": LIGHT, "high-contrast": HIGH_CONTRAST}


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
            f"{meant}Themes: {', '.join(theme_names())}. To add your own, put TOML files into"
            f" {themes_folder()}",
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
        if key == _TEXT_STYLE:
            _check_text_style(path, text, value)
        else:
            _check_colour(path, text, ("variables", key), value)
    return replace(base, name=f"user-{name}", dark=dark, variables={**base.variables, **variables}, **given)


def _check_text_style(path: Path, text: str, value: Any) -> None:
    words = value.split() if isinstance(value, str) else []
    # “not” and “none” are valid flags, but cannot be combined with every other word. Allow only “none”, and
    # only on its own.
    if value != "none" and not (words and VALID_STYLE_FLAGS - {"none", "not"} >= {*words}):
        problem = f"{_TEXT_STYLE!r} is {value!r}, which is not a text style"
        advice = 'write "none", "bold", "reverse", "underline" or "bold underline"'
        raise error_at(path, text, ("variables", _TEXT_STYLE), problem, advice)


def _check_colour(path: Path, text: str, keys: tuple[str, ...], value: Any) -> None:
    try:
        if not isinstance(value, str):
            raise ColorParseError("not a string")
        Color.parse(value)
    except ColorParseError:
        raise error_at(
            path, text, keys, f"'{keys[-1]}' is {value!r}, which is not a colour", 'write it as "#7aa2c8"'
        ) from None
