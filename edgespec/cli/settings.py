"""Read settings from the settings file and the environment. The command line overrides both."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
from click.core import ParameterSource

from edgespec.cli.commands import COMMANDS, load_command
from edgespec.cli.help import BEFORE_COMMAND, SectionOption
from edgespec.cli.settings_file import KeyPath, line_number
from edgespec.errors import (
    ConfigurationError,
    DownloadError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    OptionError,
)
from edgespec.files import config_folder, error_reason, read_regular_file
from edgespec.option_kinds import Flag, Size
from edgespec.options import SETTINGS, Option, unread_options

__all__ = [
    "ALL_COMMANDS",
    "VARIABLES",
    "SettingOption",
    "SettingValue",
    "Settings",
    "Written",
    "error_text",
    "read_text",
    "setting_value",
    "settings_of",
    "settings_path",
    "suggestion",
    "variable_of",
    "with_setting_source",
]

Written: TypeAlias = bool | str | tuple[str, ...]
"""A value as it would be written on the command line. Repeatable options have several."""

ALL_COMMANDS = ""
"""The section of settings that are for every command: the lines above the first section."""
_PREFIX = "EDGESPEC_"
VARIABLES = {
    "EDGESPEC_CONFIG_DIR": "folder of the settings file and of aliases",
    "EDGESPEC_DATA_DIR": "folder of chats and saved measurements",
    "EDGESPEC_CACHE_DIR": "folder of files that can be made again",
    "EDGESPEC_DEBUG": "1 shows a traceback with errors",
}
"""Environment variables that are not settings, with what they are for."""

_TRUTHS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_SETTINGS_KEY = "edgespec.cli.settings"
_USED_KEY = "edgespec.cli.settings used"
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class SettingValue:
    """Describes the value of one setting.

    Attributes:
        written: The value as a string, as written on the command line.
        value: The parsed value.
        source: ENVIRONMENT for an environment variable, or DEFAULT_MAP for the settings file.
        where: The path of the file, or the name of the variable.
    """

    written: Written
    value: Any
    source: ParameterSource
    where: str


class SettingOption(SectionOption):
    """A command line option that can also be set in the environment or the settings file.

    Attributes:
        declaration: The option's declaration in `edgespec.options`.
    """

    def __init__(self, *args: Any, declaration: Option, **settings: Any) -> None:
        self.declaration = declaration
        super().__init__(*args, **settings)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """Return the value from the command line, otherwise from the settings, otherwise the default.

        Raises:
            ConfigurationError: A setting is invalid.
        """
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.DEFAULT or ctx.resilient_parsing:
            return value, source
        found = _configured(ctx, str(self.name))
        return (found.written, found.source) if found else (value, source)


@dataclass(frozen=True)
class Settings:
    """Contains all settings in the environment and the settings file.

    Attributes:
        path: Path of the settings file, which may not exist.
        environment: Values from environment variables, keyed by setting.
        file: Values from the file, keyed by command (ALL_COMMANDS for every command), then by setting.
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
        environment = dict(_from_environment(os.environ, problems))
        file: dict[str, dict[str, SettingValue]] = {}
        try:
            text = read_text(path)
            if text is not None:
                file = _FileReader(path, text, problems).read()
        except ConfigurationError as error:
            problems.append(error)
        return cls(path, environment, file, tuple(problems))

    def find(self, command: str, name: str) -> SettingValue | None:
        """Look up a setting in the environment, then the command's section, then the common section."""
        places = (self.environment, self.file.get(command, {}), self.file.get(ALL_COMMANDS, {}))
        return next((place[name] for place in places if name in place), None)


def settings_path() -> Path:
    """Return the path of the settings file, which may not exist."""
    return config_folder() / "config.toml"


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a setting."""
    return _PREFIX + name.upper()


def settings_of(command: str) -> dict[str, SettingOption]:
    """Return the settings that a command uses, keyed by name."""
    loaded = load_command(command)
    options = loaded.params if loaded else ()
    return {option.name: option for option in options if isinstance(option, SettingOption) and option.name}


def read_text(path: Path) -> str | None:
    """Return the text of a settings file, or None if the file does not exist.

    Raises:
        ConfigurationError: The file cannot be read, or is not TOML.
    """
    try:
        text = read_regular_file(path).decode("utf-8-sig")
        tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigurationError(
            f"{path}, line {line}: this is not UTF-8 text", "save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the settings in {path} cannot be read: {error_reason(error)}",
            "make it a readable file, or move it away",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _syntax_error(path, text, error) from error
    return text


def _syntax_error(path: Path, text: str, error: Exception) -> ConfigurationError:
    """Return an error with the line and column where a file is not valid TOML."""
    reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
    place = _PLACE.search(reason)
    where = str(path)
    if place:
        reason = reason[: place.start()]
        where += f", line {place[1] or text.rstrip().count(chr(10)) + 1}"
        where += f", column {place[2]}" if place[2] else ""
    return ConfigurationError(
        f"{where}: {reason[:1].lower()}{reason[1:]}",
        'write lines such as target = "8b-q4", or move the file away',
    )


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint that suggests the nearest known name without its `prefix`."""
    stems = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), stems, 1)
    return f"did you mean {prefix}{near[0]}?" if near else "`edgespec config` shows all settings"


def setting_value(name: str, text: Written) -> Any:
    """Parse the value of a setting from a string or several strings.

    Raises:
        ValueError: The string cannot be parsed. The subclass OptionError is raised if the value is invalid.
    """
    option = SETTINGS[name]
    if isinstance(option.kind, Flag):
        if isinstance(text, bool):
            return text
        if str(text).lower() not in _TRUTHS:
            raise ValueError(f"{text!r} is neither true nor false")
        return _TRUTHS[str(text).lower()]
    if option.kind.repeatable:
        texts = text if isinstance(text, tuple) else (str(text),)
        value: Any = tuple(option.kind.parse(each) for each in texts)
        option.check(name, type(option.default)(value))
    else:
        value = option.kind.parse(str(text))
        option.check(name, value)
    return value


def error_text(name: str, error: ValueError) -> str:
    """Return one line that explains why a setting is invalid."""
    return str(error) if isinstance(error, OptionError) else f"{name}: {str(error).rstrip('.')}"


def _from_environment(
    environment: Mapping[str, str], problems: list[ConfigurationError]
) -> Iterator[tuple[str, SettingValue]]:
    """Yield the settings from environment variables. An empty variable counts as unset."""
    names = {variable_of(name): name for name in SETTINGS}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_PREFIX) or variable in VARIABLES or not text:
            continue
        if variable not in names:
            step = suggestion(variable, [*names, *VARIABLES], _PREFIX)
            problems.append(ConfigurationError(f"there is no setting for the variable {variable}", step))
            continue
        name = names[variable]
        written: Written = (text,) if SETTINGS[name].kind.repeatable else text
        try:
            value = setting_value(name, written)
        except ValueError as error:
            step = "" if isinstance(error, OptionError) else f"correct it, or unset {variable}"
            problems.append(ConfigurationError(f"{variable}: {error_text(name, error)}", step))
        else:
            yield name, SettingValue(written, value, ParameterSource.ENVIRONMENT, variable)


class _FileReader:
    """Reads settings from a TOML file. Appends an error to `problems` for each invalid setting."""

    def __init__(self, path: Path, text: str, problems: list[ConfigurationError]) -> None:
        self._path = path
        self._text = text
        self._problems = problems

    def read(self) -> dict[str, dict[str, SettingValue]]:
        """Return the values, keyed by command, then by setting."""
        values: dict[str, dict[str, SettingValue]] = {ALL_COMMANDS: {}}
        for name, value in tomllib.loads(self._text).items():
            if name in COMMANDS and isinstance(value, dict):
                values[name] = dict(self._read_section(name, value))
            elif name in SETTINGS:
                values[ALL_COMMANDS] |= self._read_value((name,), value)
            elif name in ("aliases", "pairs"):
                from edgespec.catalog.catalogue import user_aliases_path

                self._refuse((name,), f"{name} are not settings", f"put them into {user_aliases_path()}")
            else:
                sections = COMMANDS if isinstance(value, dict) else ()
                step = suggestion(name, sections or SETTINGS)
                self._refuse((name,), f"there is no setting {name!r}", step)
        return values

    def _read_section(self, command: str, table: dict[str, Any]) -> Iterator[tuple[str, SettingValue]]:
        options = settings_of(command)
        if not options:
            self._refuse((command,), f"{command} has no settings", "take the section out")
            return
        for name, value in table.items():
            if name in options:
                yield from self._read_value((command, name), value).items()
            else:
                problem = f"{command} has no setting {name!r}"
                self._refuse((command, name), problem, suggestion(name, options))

    def _read_value(self, path: KeyPath, given: Any) -> dict[str, SettingValue]:
        name = path[-1]
        try:
            written = _as_written(name, given)
            value = setting_value(name, written)
            if not (isinstance(SETTINGS[name].kind, Size) and isinstance(given, int)):
                _check_toml_type(given, value)
        except ValueError as error:
            step = f"correct it, or `edgespec config unset {'.'.join(path)}`"
            self._refuse(path, error_text(name, error), "" if isinstance(error, OptionError) else step)
            return {}
        return {name: SettingValue(written, value, ParameterSource.DEFAULT_MAP, str(self._path))}

    def _refuse(self, path: KeyPath, problem: str, next_step: str) -> None:
        line = line_number(self._text, path)
        where = f"{self._path}, line {line}" if line else str(self._path)
        self._problems.append(ConfigurationError(f"{where}: {problem}", next_step))


def _as_written(name: str, value: Any) -> Written:
    """Convert a TOML value to its form on the command line. Raises ValueError."""
    kind = SETTINGS[name].kind
    if isinstance(kind, Flag):
        if isinstance(value, bool):
            return value
        raise ValueError(f"{value!r} is neither true nor false, without quotes")
    if isinstance(value, list):
        texts = tuple(str(item) for item in value if _is_plain(item))
        if len(texts) == len(value):
            return texts if kind.repeatable else ",".join(texts)
    elif kind.repeatable:
        raise ValueError(f"{value!r} is not a list, such as {name} = [...]")
    elif _is_plain(value):
        return str(value)
    raise ValueError(f"{value!r} is not a valid value for this setting")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _check_toml_type(given: Any, value: Any) -> None:
    """Raise ValueError if a TOML value has the wrong type, even if its text could be parsed."""
    if isinstance(given, list) and not isinstance(value, tuple):
        raise ValueError(f"{given!r} is a list, but this setting has one value")
    if isinstance(value, str) and not isinstance(given, str):
        raise ValueError(f'{given!r} is not a string: write "{given}"')
    if isinstance(given, str) and isinstance(value, int | float) and _NUMBER.fullmatch(given):
        raise ValueError(f"{given!r} is a string: write it without quotes")


def _configured(ctx: click.Context, name: str) -> SettingValue | None:
    """Return the setting for an option of the current command. Raises ConfigurationError."""
    settings = ctx.meta.get(_SETTINGS_KEY)
    if settings is None:
        settings = ctx.meta[_SETTINGS_KEY] = Settings.read()
        ctx.meta[BEFORE_COMMAND] = _leave_out_unread
    if settings.problems:
        raise settings.problems[0]
    found: SettingValue | None = settings.find(ctx.info_name or "", name)
    if found:
        ctx.meta.setdefault(_USED_KEY, {})[name] = found
    return found


def _leave_out_unread(ctx: click.Context) -> None:
    """Ignore settings that no drafter in this run's method uses, and print a note for each.

    On the command line, such an option is an error. A setting, however, applies to all runs, whatever their
    method.
    """
    from edgespec.cli.screen import note

    used: dict[str, SettingValue] = ctx.meta.get(_USED_KEY, {})
    if not used:
        return
    params = ctx.params
    for name in unread_options((params.get("method") or "auto", *(params.get("methods") or ()))):
        if name in used:
            del params[name]  # `load` then uses its default value
            note(f"{name} ({used.pop(name).where}) is ignored: this method does not use it")


def with_setting_source(error: EdgespecError, ctx: click.Context) -> EdgespecError:
    """Mention in an error where its setting was set, unless it was set on the command line."""
    used: dict[str, SettingValue] = ctx.meta.get(_USED_KEY, {})
    for name, found in used.items():
        if isinstance(error, OptionError):
            dashed = re.escape("--" + name.replace("_", "-"))
            is_about = bool(re.search(rf"^{name}\b|{dashed}\b", str(error)))
        else:
            about_a_model = isinstance(error, ModelNotFoundError | ModelFileError | DownloadError)
            is_about = (
                about_a_model and name in ("target", "draft") and str(found.value).strip() in error.what
            )
        if is_about:
            return ConfigurationError(f"{error.what} ({name} is set in {found.where})", error.next_step)
    return error
