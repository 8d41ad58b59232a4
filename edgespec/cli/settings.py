"""Read settings from the settings file and the environment. Command line options override both."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgespec.cli.help import BEFORE_RUN, COMMANDS, SectionOption, load_command
from edgespec.errors import (
    CancelledError,
    ConfigurationError,
    EdgespecError,
    OptionError,
)
from edgespec.options.presets import preset_path, read_preset
from edgespec.options.settings import SETTINGS, Option, setting_value, unknown_setting, unread_options
from edgespec.options.settings_file import KeyPath, error_at, read_text, settings_path
from edgespec.system.files import config_folder
from edgespec.system.spelling import nearest

__all__ = [
    "ALL_COMMANDS",
    "VARIABLES",
    "SettingOption",
    "SettingValue",
    "Settings",
    "ignore_setting",
    "preset_of",
    "settings_of",
    "suggestion",
    "use_preset",
    "variable_of",
    "with_setting_source",
]

ALL_COMMANDS = ""
"""Section name for settings that apply to every command, which come before the file's first section."""
_PREFIX = "EDGESPEC_"
VARIABLES = {
    "EDGESPEC_CONFIG_DIR": "folder for the settings file and aliases",
    "EDGESPEC_DATA_DIR": "folder for chats, replies and trained weights",
    "EDGESPEC_CACHE_DIR": "folder for caches, converted models and measurements",
    "EDGESPEC_API_KEY": "key that programs must send to `edgespec serve`",
    "EDGESPEC_DEBUG": "set to 1 to show a traceback with each error",
}
"""Environment variables that are not settings, with their purposes."""

_SETTINGS_KEY = "edgespec.cli.settings"
_USED_KEY = "edgespec.cli.settings used"
_PRESET_KEY = "edgespec.cli.settings preset"
_MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of one setting.

    Attributes:
        value: The value, converted to the type of its option.
        source: ENVIRONMENT or DEFAULT_MAP (the settings file).
        where: The path of the file, or the name of the environment variable.
    """

    value: Any
    source: ParameterSource
    where: str


class SettingOption(SectionOption):
    """A command line option that can also be set in the environment or the settings file.

    Attributes:
        declaration: The option's declaration in `edgespec.options.settings`.
    """

    def __init__(self, *args: Any, declaration: Option, **settings: Any) -> None:
        self.declaration = declaration
        super().__init__(*args, **settings)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """Return the value from the command line, the preset, the settings or the default, in that order.

        Raises:
            ConfigurationError: A setting is invalid.
        """
        ctx.meta[BEFORE_RUN] = _ignore_unread_settings
        value, source = super().consume_value(ctx, opts)
        if source is ParameterSource.DEFAULT_MAP:
            ctx.meta.setdefault(_USED_KEY, {})[self.name] = SettingValue(
                value, source, str(preset_path(ctx.meta[_PRESET_KEY]))
            )
        if source is not ParameterSource.DEFAULT or ctx.resilient_parsing:
            return value, source
        settings = ctx.meta.get(_SETTINGS_KEY)
        if settings is None:
            settings = ctx.meta[_SETTINGS_KEY] = Settings.read()
        if settings.problems:
            raise settings.problems[0]
        found = settings.find(ctx.command.name or "", str(self.name))
        if found is None:
            return value, source
        ctx.meta.setdefault(_USED_KEY, {})[self.name] = found
        return found.value, found.source


@dataclass(frozen=True)
class Settings:
    """All settings in the environment and the settings file.

    Attributes:
        path: Path of the settings file, which may not exist.
        environment: Values from environment variables, keyed by setting.
        file: Values from the file, keyed by command (or ALL_COMMANDS), then by setting.
        problems: One error for each invalid setting. Invalid settings are not in `environment` or `file`.
    """

    path: Path
    environment: Mapping[str, SettingValue]
    file: Mapping[str, Mapping[str, SettingValue]]
    problems: tuple[ConfigurationError, ...]

    @classmethod
    def read(cls) -> Settings:
        """Read the environment and the file. Errors are collected in `problems`, not raised."""
        path = settings_path()
        problems: list[ConfigurationError] = []
        environment = dict(_from_environment(problems))
        file: dict[str, dict[str, SettingValue]] = {}
        try:
            if (text := read_text(path)) is not None:
                file = _from_file(path, text, problems)
        except ConfigurationError as error:
            problems.append(error)
        return cls(path, environment, file, tuple(problems))

    def find(self, command: str, name: str) -> SettingValue | None:
        """Return a setting from the environment or the settings file, or None if it is not set."""
        places = (self.environment, self.file.get(command, {}), self.file.get(ALL_COMMANDS, {}))
        return next((place[name] for place in places if name in place), None)


def use_preset(ctx: click.Context, name: str) -> None:
    """Make the settings of a preset the defaults of a command's options.

    Raises:
        ConfigurationError: The preset's file is invalid.
        OptionError: There is no such preset.
    """
    ctx.default_map = dict(read_preset(name).settings)
    ctx.meta[_PRESET_KEY] = name


def preset_of(ctx: click.Context) -> str | None:
    """Return the name of the preset that a command uses, or None."""
    name: str | None = ctx.meta.get(_PRESET_KEY)
    return name


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a setting."""
    return _PREFIX + name.upper()


def settings_of(command: str) -> dict[str, SettingOption]:
    """Return the settings that a command uses, keyed by name."""
    loaded = load_command(command)
    options = loaded.params if loaded else ()
    return {option.name: option for option in options if isinstance(option, SettingOption) and option.name}


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint listing the names in `known` that are most similar to `name`, ignoring `prefix`."""
    near = nearest(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known])
    return (
        f"did you mean {' or '.join(prefix + each for each in near)}?"
        if near
        else "`edgespec config` shows all settings"
    )


def _from_environment(problems: list[ConfigurationError]) -> Iterator[tuple[str, SettingValue]]:
    """Yield the settings from environment variables. An empty variable counts as unset."""
    names = {variable_of(name): name for name in SETTINGS}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(_PREFIX) or variable in VARIABLES or not text:
            continue
        if variable not in names:
            step = suggestion(variable, [*names, *VARIABLES], _PREFIX)
            problems.append(
                ConfigurationError(
                    f"the environment variable {variable} does not match any setting",
                    step,
                    code="option_unknown",
                )
            )
            continue
        try:
            value = setting_value(names[variable], text)
        except OptionError as error:
            problems.append(ConfigurationError(f"{variable}: {error.what}", error.next_step, code=error.code))
        else:
            yield names[variable], SettingValue(value, ParameterSource.ENVIRONMENT, variable)


def _from_file(
    path: Path, text: str, problems: list[ConfigurationError]
) -> dict[str, dict[str, SettingValue]]:
    """Return the settings in a TOML file, keyed by command, then by setting.

    Appends an error to `problems` for each invalid setting.
    """
    values: dict[str, dict[str, SettingValue]] = {ALL_COMMANDS: {}}

    def refuse(key: KeyPath, problem: str, next_step: str) -> None:
        problems.append(error_at(path, text, key, problem, next_step))

    def read(command: str, key: KeyPath, given: Any) -> None:
        try:
            value = setting_value(key[-1], given)
        except OptionError as error:
            refuse(key, error.what, error.next_step)
        else:
            found = SettingValue(value, ParameterSource.DEFAULT_MAP, str(path))
            values.setdefault(command, {})[key[-1]] = found

    for name, given in tomllib.loads(text).items():
        if name in COMMANDS and isinstance(given, dict):
            options = settings_of(name)
            if not options:
                refuse((name,), f"{name} has no settings", "remove this section")
                continue
            for key, inner in given.items():
                if key in options:
                    read(name, (name, key), inner)
                else:
                    refuse(
                        (name, key), f"{name} has no setting {key[:_MAX_NAME]!r}", suggestion(key, options)
                    )
        elif name in SETTINGS:
            read(ALL_COMMANDS, (name,), given)
        elif name in ("aliases", "pairs"):
            from edgespec.store.catalogue import user_aliases_path

            refuse((name,), f"{name} are not settings", f"move the {name} to {user_aliases_path()}")
        elif name in ("tools", "presets"):
            place = config_folder() / ("tools.toml" if name == "tools" else "presets")
            refuse((name,), f"{name} are not settings", f"move the {name} to {place}")
        else:
            refuse((name,), *unknown_setting(name, COMMANDS if isinstance(given, dict) else SETTINGS))
    return values


def _ignore_unread_settings(ctx: click.Context) -> None:
    """Ignore settings that no drafter in this run's method uses, printing a note for each.

    On the command line, such an option is an error, but settings apply to all runs, whatever the method.
    """
    from edgespec.cli.screen import note

    used: dict[str, SettingValue] = ctx.meta.get(_USED_KEY, {})
    params = ctx.params
    for name in unread_options((params.get("method") or "auto", *(params.get("methods") or ()))):
        if name in used:
            del params[name]
            note(f"{name} ({used.pop(name).where}) is ignored: this method does not use it")


def ignore_setting(ctx: click.Context, name: str) -> None:
    """Exclude a setting's source from error messages, because another value has replaced the setting."""
    ctx.meta.get(_USED_KEY, {}).pop(name, None)


def with_setting_source(error: EdgespecError, ctx: click.Context) -> EdgespecError:
    """If a setting caused the error, add the setting's file or environment variable to the message."""
    used: dict[str, SettingValue] = ctx.meta.get(_USED_KEY, {})
    name = error.option
    if name not in used or isinstance(error, CancelledError):
        return error
    return ConfigurationError(
        f"{error.what} ({name} is set in {used[name].where})", error.next_step, code=error.code, option=name
    )
