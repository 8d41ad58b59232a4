"""The command /preset, which applies a saved system prompt, model and settings, or saves the current ones."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edgespec.chat.saved_chat import Setting
from edgespec.errors import ConfigurationError, OptionError
from edgespec.options.presets import Preset, preset_names, preset_path, read_preset, write_preset
from edgespec.tui.commands.results import Action, Change, Command, Context, Question, Result, Text
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import SCHEMA, SETTINGS, accepted, check_settings

__all__ = ["COMMANDS", "apply_preset"]

_NO_PRESETS = (
    "There are no presets yet. Type /preset save NAME to save the current system prompt, model and settings"
    " under a name."
)


def _preset(context: Context) -> Result:
    """Apply the preset with a name, or let the user choose one. `save NAME` saves a preset."""
    word, _, name = context.argument.partition(" ")
    if word == "save":
        return _save(context, name.strip())
    if context.argument:
        return apply_preset(context)
    names = preset_names()
    if not names:
        return Text(_NO_PRESETS)
    hint = "To use one, type /preset and its name."
    return Action("presets", otherwise=lambda: (Text("\n".join(names)), Text(hint, is_hint=True)))


def apply_preset(context: Context) -> Result:
    """Use the preset that the argument names, from the next message on.

    Raises:
        OptionError: There is no such preset, its file is invalid, or the models do not support its settings.
    """
    name = context.argument
    values = _values(name, context.chat)
    check_settings(values.settings, context.runtime)

    def apply(chat: OpenChat) -> None:
        chat.settings, chat.system = dict(values.settings), values.system

    change = Change(apply, f"The preset {name} takes effect with your next message.")
    remark = Text(values.remark, is_hint=True)
    if values.target and values.target != context.model_name:
        return change, remark, Action("use_model", values.target)
    return change, remark


class _PresetValues(NamedTuple):
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


def _values(name: str, chat: OpenChat) -> _PresetValues:
    """Read a preset for use in a chat. Raises OptionError if the preset is invalid or missing."""
    try:
        chosen = read_preset(name)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step, code=error.code) from error
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
            f"The preset also sets {' and '.join(given)}, which applies only when a model is loaded. To use"
            " it"
            f" too, quit and run: edgespec chat --preset {name}"
        )
    return _PresetValues(settings, system or None, target, remark)


def _as_chat_value(value: object) -> Setting:
    if isinstance(value, tuple):
        return list(value)
    assert isinstance(value, str | int | float | bool)
    return value


def _save(context: Context, name: str) -> Result:
    """Save the current system prompt, model and settings, after a question if the preset exists."""
    if not name:
        raise OptionError("The preset needs a name", "Type /preset save NAME")
    chat = context.chat
    settings: dict[str, object] = {"system": chat.system} if chat.system else {}
    settings["target"] = context.model_name
    settings |= {key: value for key, value in chat.settings.items() if key != SCHEMA}
    preset = Preset(name, settings)
    if not preset_path(name).exists():
        return _written(preset, chat)
    return Question(
        f"Replace the existing preset {name}?",
        "Replace",
        lambda: _written(preset, chat),
        declined="The preset was not saved.",
    )


def _written(preset: Preset, chat: OpenChat) -> Text:
    path: Path = write_preset(preset)
    omitted = (
        " The schema is not included, because presets do not store one." if SCHEMA in chat.settings else ""
    )
    return Text(f"Saved the preset {preset.name} in {path}.{omitted} To use it, type /preset {preset.name}.")


COMMANDS = (
    Command(
        "preset",
        "[name|save name]",
        "use or save a system prompt, model and settings",
        _preset,
        slow="writes",
    ),
)
