"""What a person sets once: options in a file or in the environment. The command line wins over both."""

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

from edgespec.cli.options import SAMPLING_NAMES, SIZE_NAMES, SettingOption, every_setting
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

__all__ = [
    "FOR_ALL",
    "VARIABLES",
    "Found",
    "Settings",
    "Written",
    "configured",
    "from_text",
    "leave_out_unread",
    "nearest",
    "read_text",
    "said_of",
    "settings_of",
    "settings_path",
    "traced",
    "variable_of",
]

Written: TypeAlias = bool | str | tuple[str, ...]
"""A value as it would be written on the command line; several where an option may be repeated."""

FOR_ALL = ""
_PREFIX = "EDGESPEC_"
VARIABLES = {
    "EDGESPEC_CONFIG_DIR": "the folder of the settings file and of aliases",
    "EDGESPEC_DATA_DIR": "the folder of chats, and of what was learnt",
    "EDGESPEC_CACHE_DIR": "the folder of what can be made again",
    "EDGESPEC_DEBUG": "1 shows where an error comes from",
}
"""Variables that are no settings, and what they are for."""

_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
_KEPT = "edgespec.cli.settings"
_USED = "edgespec.cli.settings used"
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class Found:
    """A value that was set. where: the file, or the name of the variable."""

    written: Written
    value: Any
    source: ParameterSource
    where: str


@dataclass(frozen=True)
class Settings:
    """What the environment and the file say. `file` is by command, FOR_ALL for the lines above the sections.

    What cannot be used is not among the values, and `problems` says why.
    """

    path: Path
    environment: Mapping[str, Found]
    file: Mapping[str, Mapping[str, Found]]
    problems: tuple[ConfigurationError, ...]

    @classmethod
    def read(cls) -> Settings:
        """Look at both. Raises nothing: see `problems`."""
        path = settings_path()
        problems: list[ConfigurationError] = []
        environment = dict(_from_environment(os.environ, problems))
        file: dict[str, dict[str, Found]] = {}
        try:
            text = read_text(path)
            if text is not None:
                file = _File(path, text, problems).read()
        except ConfigurationError as error:
            problems.append(error)
        return cls(path, environment, file, tuple(problems))

    def find(self, command: str, name: str) -> Found | None:
        """What holds for this option of a command: the environment, its own section, the lines above."""
        places = (self.environment, self.file.get(command, {}), self.file.get(FOR_ALL, {}))
        return next((place[name] for place in places if name in place), None)


def settings_path() -> Path:
    """The file of a user's settings. It need not exist."""
    return config_folder() / "config.toml"


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return _PREFIX + name.upper()


def settings_of(command: str) -> dict[str, SettingOption]:
    """The settings that a command reads, by name; none for one that reads none."""
    from edgespec.cli.program import program

    found = program.get_command(click.Context(program), command)
    options = found.params if found else ()
    return {option.name: option for option in options if isinstance(option, SettingOption) and option.name}


def read_text(path: Path) -> str | None:
    """The text of a sound settings file; None where there is none. Raises ConfigurationError."""
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
        raise _broken(path, text, error) from error
    return text


def _broken(path: Path, text: str, error: Exception) -> ConfigurationError:
    """A file that is not TOML: where, and what the parser says of it."""
    said = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
    place = _PLACE.search(said)
    where = str(path)
    if place:
        said = said[: place.start()]
        where += f", line {place[1] or text.rstrip().count(chr(10)) + 1}"
        where += f", column {place[2]}" if place[2] else ""
    return ConfigurationError(
        f"{where}: {said[:1].lower()}{said[1:]}",
        'write lines such as target = "8b-q4", or move the file away',
    )


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The next step for a name that is not known. prefix: what all of them begin with."""
    stems = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), stems, 1)
    return f"did you mean {prefix}{near[0]}?" if near else "`edgespec config` shows all there are"


def from_text(option: SettingOption, text: Written) -> Any:
    """What an option makes of a text, or of several. Raises click.BadParameter or OptionError."""
    if option.is_flag and isinstance(text, str) and text.lower() not in _TRUTHS:
        raise click.BadParameter(f"{text!r} is neither true nor false")
    value = option.type_cast_value(click.Context(click.Command("config")), text)
    if option.name in SAMPLING_NAMES:
        import edgespec

        setting: dict[str, Any] = {option.name: dict(value) if option.multiple else value}
        edgespec.SamplingParams(**setting)
    elif option.name in SIZE_NAMES:
        from edgespec.checks import parse_size

        parse_size(option.name, value)
    elif option.name == "method":
        from edgespec.assembly.drafting_options import Drafting

        Drafting(methods=(value,))
    return value


def _from_environment(
    environment: Mapping[str, str], problems: list[ConfigurationError]
) -> Iterator[tuple[str, Found]]:
    """The settings among the variables; an empty one is none."""
    options = every_setting()
    names = {variable_of(name): name for name in options}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_PREFIX) or variable in VARIABLES or not text:
            continue
        if variable not in names:
            step = nearest(variable, [*names, *VARIABLES], _PREFIX)
            problems.append(ConfigurationError(f"there is no setting for the variable {variable}", step))
            continue
        option = options[names[variable]]
        written: Written = (text,) if option.multiple else text
        try:
            value = from_text(option, written)
        except (click.BadParameter, OptionError) as error:
            step = "" if isinstance(error, OptionError) else f"correct it, or unset {variable}"
            problems.append(ConfigurationError(f"{variable}: {said_of(names[variable], error)}", step))
        else:
            yield names[variable], Found(written, value, ParameterSource.ENVIRONMENT, variable)


def said_of(name: str, error: click.BadParameter | OptionError) -> str:
    """What is wrong with a value, in one line."""
    return str(error) if isinstance(error, OptionError) else f"{name}: {error.message.rstrip('.')}"


class _File:
    """The values of a sound file; what is wrong with others goes to `problems`."""

    def __init__(self, path: Path, text: str, problems: list[ConfigurationError]) -> None:
        self._path = path
        self._text = text
        self._problems = problems

    def read(self) -> dict[str, dict[str, Found]]:
        from edgespec.cli.program import COMMANDS

        settings = every_setting()
        found: dict[str, dict[str, Found]] = {FOR_ALL: {}}
        for name, value in tomllib.loads(self._text).items():
            if name in COMMANDS and isinstance(value, dict):
                found[name] = dict(self._section(name, value))
            elif name in settings:
                found[FOR_ALL] |= self._value(settings[name], (name,), value)
            elif name in ("aliases", "pairs"):
                from edgespec.catalog.catalogue import user_aliases_path

                self._refuse((name,), f"{name} are not settings", f"put them into {user_aliases_path()}")
            else:
                sections = COMMANDS if isinstance(value, dict) else ()
                self._refuse((name,), f"there is no setting {name!r}", nearest(name, sections or settings))
        return found

    def _section(self, command: str, table: dict[str, Any]) -> Iterator[tuple[str, Found]]:
        options = settings_of(command)
        if not options:
            self._refuse((command,), f"{command} has no settings", "take the section out")
            return
        for name, value in table.items():
            if name in options:
                yield from self._value(options[name], (command, name), value).items()
            else:
                what = f"{command} has no setting {name!r}"
                self._refuse((command, name), what, nearest(name, options))

    def _value(self, option: SettingOption, path: KeyPath, given: Any) -> dict[str, Found]:
        try:
            written = _as_written(option, given)
            value = from_text(option, written)
            if not (option.name in SIZE_NAMES and isinstance(given, int)):
                _check_type(given, value)
        except (click.BadParameter, OptionError) as error:
            step = f"correct it, or `edgespec config unset {'.'.join(path)}`"
            self._refuse(path, said_of(path[-1], error), "" if isinstance(error, OptionError) else step)
            return {}
        return {path[-1]: Found(written, value, ParameterSource.DEFAULT_MAP, str(self._path))}

    def _refuse(self, path: KeyPath, what: str, next_step: str) -> None:
        line = line_number(self._text, path)
        where = f"{self._path}, line {line}" if line else str(self._path)
        self._problems.append(ConfigurationError(f"{where}: {what}", next_step))


def _as_written(option: SettingOption, value: Any) -> Written:
    """What one would write on the command line for a value of the file. Raises click.BadParameter."""
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise click.BadParameter(f"{value!r} is neither true nor false, without quotes")
    if isinstance(value, list):
        texts = tuple(str(item) for item in value if _is_plain(item))
        if len(texts) == len(value):
            return texts if option.multiple else ",".join(texts)
    elif option.multiple:
        raise click.BadParameter(f"{value!r} is not a list, such as {option.name} = [...]")
    elif _is_plain(value):
        return str(value)
    raise click.BadParameter(f"{value!r} is not what this setting takes")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _check_type(given: Any, value: Any) -> None:
    """Refuse what would be understood on the command line, where all is text, but has another type here."""
    if isinstance(given, list) and not isinstance(value, tuple):
        raise click.BadParameter(f"{given!r} is a list, and this takes one value")
    if isinstance(value, str) and not isinstance(given, str):
        raise click.BadParameter(f'{given!r} is not a text: write "{given}"')
    if isinstance(given, str) and isinstance(value, int | float) and _NUMBER.fullmatch(given):
        raise click.BadParameter(f"{given!r} is a text: write it without quotes")


def configured(ctx: click.Context, option: SettingOption) -> Found | None:
    """What is set for this option of the command that runs. Raises ConfigurationError."""
    settings = ctx.meta.get(_KEPT)
    if settings is None:
        settings = ctx.meta[_KEPT] = Settings.read()
    if settings.problems:
        raise settings.problems[0]
    found: Found | None = settings.find(ctx.info_name or "", option.name)
    if found:
        ctx.meta.setdefault(_USED, {})[option.name] = found
    return found


def leave_out_unread(ctx: click.Context) -> list[str]:
    """Leave options at their defaults that are set for all runs, and that no drafter of this one reads.

    Written on the command line they are refused: see `Drafting`. Gives what was left out, a line each.
    """
    used: dict[str, Found] = ctx.meta.get(_USED, {})
    if not used:
        return []
    from edgespec.assembly.drafting_options import unread

    params = ctx.params
    left_out = []
    for name in unread((params.get("method") or "auto", *(params.get("methods") or ()))):
        if name in used:
            del params[name]  # what is not given to `load` has its default there
            left_out.append(f"{name} ({used.pop(name).where}) is left out: this method does not read it")
    return left_out


def traced(error: EdgespecError, ctx: click.Context) -> EdgespecError:
    """The error with the place where the setting it is about was set, if that is not the command line."""
    used: dict[str, Found] = ctx.meta.get(_USED, {})
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
