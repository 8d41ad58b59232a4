"""Convert between presets and the system prompt, model and settings of a chat."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edgespec.chat.saved_chat import Setting
from edgespec.errors import ConfigurationError, OptionError
from edgespec.presets import Preset, preset_path, read_preset
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import SCHEMA, SETTINGS, accepted

__all__ = ["NO_PRESETS", "PresetValues", "preset_from_chat", "preset_values", "saved_text"]

NO_PRESETS = (
    "There are no presets yet. Type /preset save NAME to save the current system prompt, model and settings"
    " under a name."
)


class PresetValues(NamedTuple):
    """The values that a preset sets in a chat.

    Attributes:
        settings: All settings of the chat with this preset.
        system: The system prompt.
        target: A reference to the model. Empty if the preset names none.
        remark: A sentence about values that cannot change while a model is loaded. Empty if there are none.
    """

    settings: dict[str, Setting]
    system: str | None
    target: str
    remark: str


def preset_values(name: str, chat: OpenChat) -> PresetValues:
    """Read a preset for use in a chat. Raises OptionError if the preset is invalid or missing."""
    try:
        chosen = read_preset(name)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step) from error
    given = dict(chosen.settings)
    system, target = given.pop("system", None), str(given.pop("target", ""))
    in_chat = {key: _as_chat_value(given.pop(key)) for key in SETTINGS if key in given}
    settings, problems = accepted(in_chat)
    if problems:
        raise OptionError(f"The preset {name} was not applied: {problems[0]}", f"Edit {preset_path(name)}")
    if SCHEMA in chat.settings:
        settings[SCHEMA] = chat.settings[SCHEMA]
    remark = ""
    if given:
        remark = (
            f"The preset also sets {' and '.join(given)}, which cannot change while a model is loaded. To use"
            f" that too, quit and run: edgespec chat --preset {name}"
        )
    return PresetValues(settings, system or None, target, remark)


def _as_chat_value(value: object) -> Setting:
    if isinstance(value, tuple):
        return list(value)
    assert isinstance(value, str | int | float | bool)
    return value


def preset_from_chat(name: str, chat: OpenChat, model_name: str) -> Preset:
    """Return a preset with the chat's system prompt, model and settings.

    Raises:
        OptionError: `name` is empty.
    """
    if not name:
        raise OptionError("The preset needs a name", "Type /preset save NAME")
    settings: dict[str, object] = {"system": chat.system} if chat.system else {}
    settings["target"] = model_name
    settings |= {key: value for key, value in chat.settings.items() if key != SCHEMA}
    return Preset(name, settings)


def saved_text(name: str, path: Path, chat: OpenChat) -> str:
    """Return the confirmation that a preset was saved."""
    omitted = (
        " The schema is not included, because presets do not store one." if SCHEMA in chat.settings else ""
    )
    return f"Saved the preset {name} in {path}.{omitted} To use it, type /preset {name}."
