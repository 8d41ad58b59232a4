"""The commands /set and /schema, for both the full-screen and the plain chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from edgespec.chat.saved_chat import Setting
from edgespec.tui.settings import SCHEMA, SETTINGS, default_text, parse, read_schema, setting_named, shown
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec import Runtime

__all__ = ["SettingsChange", "changed_schema", "changed_settings", "check_settings", "unquoted"]


class SettingsChange(NamedTuple):
    """The result of a command: the new settings (None if unchanged) and a note for the user."""

    settings: dict[str, Setting] | None
    note: str


def changed_settings(argument: str, current: Mapping[str, Setting], runtime: Runtime) -> SettingsChange:
    """Return the result of `/set NAME VALUE`. Without a value, only describe the setting.

    Ollama's syntax, such as `/set parameter temperature 0.5`, is also accepted.

    Raises:
        OptionError: The setting is unknown, or its value is invalid.
    """
    word, _, text = argument.removeprefix("parameter ").replace("=", " ", 1).partition(" ")
    text = text.strip()
    name, settings = setting_named(word), dict(current)
    if not text:
        default = f"{default_text(name, runtime, settings)} (default)"
        value = shown(settings[name]) if name in settings else default
        return SettingsChange(None, sentences(f"{name}: {value}", SETTINGS[name].hint))
    if text.lower() in ("default", "none", "off") and not (name == "method" and text == "none"):
        settings.pop(name, None)
        note = f"{name} was reset to its default: {default_text(name, runtime, settings)}."
    else:
        settings[name] = parse(name, unquoted(text))
        note = f"{name} is now {shown(settings[name])}."
    return SettingsChange(settings, note)


def changed_schema(argument: str, current: Mapping[str, Setting]) -> SettingsChange:
    """Return the result of `/schema FILE`. Raises OptionError if the file is not a JSON schema."""
    settings = dict(current)
    if not argument:
        return SettingsChange(
            None, f"schema: {settings[SCHEMA]}" if SCHEMA in settings else "No schema is set."
        )
    if argument.lower() in ("none", "off"):
        settings.pop(SCHEMA, None)
        return SettingsChange(settings, "The schema was removed.")
    settings[SCHEMA] = read_schema(unquoted(argument))
    return SettingsChange(settings, f"Replies now satisfy the schema in {argument}.")


def check_settings(settings: Mapping[str, Setting], runtime: Runtime) -> None:
    """Raise OptionError if the loaded models cannot generate replies with these settings."""
    if "method" in settings:
        runtime.method_for(str(settings["method"]))
    if SCHEMA in settings:
        runtime.check_options(schema=str(settings[SCHEMA]))


def unquoted(text: str) -> str:
    """Return the text without surrounding quotes, which some users write around values."""
    for quotes in ('"""', '"', "'"):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)].strip()
    return text
