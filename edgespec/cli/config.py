"""`edgespec config`: show and change the settings that apply to all runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.failures import DONE, FAILED, describe, usage_error
from edgespec.cli.help import COMMANDS, HelpfulGroup
from edgespec.cli.options import every_setting, json_option
from edgespec.cli.screen import line_of, note, print_json, print_table, printable
from edgespec.cli.settings import (
    ALL_COMMANDS,
    VARIABLES,
    SettingOption,
    Settings,
    SettingValue,
    settings_of,
    suggestion,
    variable_of,
)
from edgespec.errors import OptionError
from edgespec.options.option import TokenBiases
from edgespec.options.settings import setting_value, unknown_setting
from edgespec.options.settings_file import KeyPath, quoted, settings_path, write_value
from edgespec.system.files import cache_folder, config_folder, data_folder

__all__ = ["command"]


@dataclass(frozen=True, slots=True)
class _Row:
    """One line in the list of settings.

    Attributes:
        value: The value, for JSON output.
        shown: The value as text, or a description of the default if the setting is unset.
        source: `environment`, `file` or `default`.
        where: The environment variable or the path of the file. Empty for defaults.
    """

    value: Any
    shown: str
    source: str
    where: str


@click.group(
    "config",
    cls=HelpfulGroup,
    invoke_without_command=True,
    short_help="Show or change the settings that apply to all runs.",
    examples=(
        "edgespec config",
        "edgespec config get target",
        "edgespec config set target 8b-q4",
        "edgespec config set chat.temperature 0.6",
        "edgespec config unset target",
    ),
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> int:
    """Show all settings, their values and where each value was set.

    Command line options override environment variables such as EDGESPEC_TARGET, which override the settings
    file, which overrides the defaults. The file contains lines such as target = "8b-q4". A section of the
    file, such as [chat], applies only to that command. The exit status is 1 if a setting is invalid.
    """
    if ctx.invoked_subcommand is not None:
        return DONE
    settings = Settings.read()
    rows = {name: _row(option, settings.find(ALL_COMMANDS, name)) for name, option in every_setting().items()}
    own = {name: different for name in COMMANDS if (different := _own_rows(settings, name, rows))}
    if as_json:
        commands = {name: _json_rows(different) for name, different in own.items()}
        print_json(
            {
                "path": str(settings.path),
                "exists": settings.path.is_file(),
                "settings": _json_rows(rows),
                "commands": commands,
                "variables": _json_rows(_variables()),
                "problems": [str(problem) for problem in settings.problems],
            }
        )
    else:
        by_command = {f"{name}.{key}": row for name, found in own.items() for key, row in found.items()}
        _print("SETTING", rows | by_command)
        _print("VARIABLE", _variables())
        there = "" if settings.path.is_file() else " (does not exist yet)"
        click.echo(printable(f"\nsettings file: {settings.path}{there}"))
    return _print_problems(settings)


def _print_problems(settings: Settings) -> int:
    for problem in settings.problems:
        click.echo(printable(describe(problem)), err=True)
    return FAILED if settings.problems else DONE


def _own_rows(settings: Settings, name: str, rows: dict[str, _Row]) -> dict[str, _Row]:
    own = {key: _row(option, settings.find(name, key)) for key, option in settings_of(name).items()}
    return {
        key: row for key, row in own.items() if (row.value, row.source) != (rows[key].value, rows[key].source)
    }


def _row(option: SettingOption, found: SettingValue | None) -> _Row:
    if found is not None:
        value = found.value
        if isinstance(option.declaration.kind, TokenBiases):
            value = [f"{token}={bias:g}" for token, bias in value]
        source = "environment" if found.source is ParameterSource.ENVIRONMENT else "file"
        return _Row(value, _text(value), source, found.where)
    declaration = option.declaration
    value = declaration.default if option.default is None else option.default
    in_words = declaration.default_text if value in (None, (), {}) else ""
    return _Row(value, in_words or _text(value), "default", "")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict):
        return ", ".join(_text(each) for each in value) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(row: _Row) -> dict[str, object]:
    return {"value": row.value, "from": row.source, "where": row.where or None}


def _json_rows(rows: dict[str, _Row]) -> dict[str, object]:
    return {name: _json(row) for name, row in rows.items()}


def _variables() -> dict[str, _Row]:
    """Return a row for each environment variable without a corresponding setting."""
    folders = {
        "EDGESPEC_CONFIG_DIR": config_folder,
        "EDGESPEC_DATA_DIR": data_folder,
        "EDGESPEC_CACHE_DIR": cache_folder,
    }
    rows = {}
    for name in VARIABLES:
        value = str(folders[name]()) if name in folders else os.environ.get(name, "")
        source = "environment" if os.environ.get(name) else "default"
        rows[name] = _Row(value, value or "none", source, name if source == "environment" else "")
    return rows


def _print(head: str, rows: dict[str, _Row]) -> None:
    print_table(
        (head, "VALUE", "FROM"), [(name, row.shown, row.where or row.source) for name, row in rows.items()]
    )


@command.command(
    "path",
    short_help="Print the path of the settings file.",
    examples=("edgespec config path", "edgespec config path --json"),
)
@json_option
def show_path(as_json: bool) -> int:
    """Print the path of the settings file, whether or not the file exists."""
    path = settings_path()
    if as_json:
        print_json({"path": str(path), "exists": path.is_file()})
    else:
        click.echo(str(path))
    return DONE


def _complete_key(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in every_setting() if name.startswith(typed)]


def _complete_value(ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    option = every_setting().get(str(ctx.params.get("key")).rpartition(".")[2])
    return option.shell_complete(ctx, typed) if option else []


@command.command(
    "get",
    short_help="Print one setting.",
    examples=("edgespec config get target", "edgespec config get chat.prefix-cache --json"),
)
@click.argument("key", shell_complete=_complete_key)
@json_option
@click.pass_context
def get_value(ctx: click.Context, key: str, as_json: bool) -> int:
    """Print the value of KEY, or its default if it is not set."""
    path = _key_path(key)
    option = _option_at(path, ctx)
    settings = Settings.read()
    row = _row(option, settings.find(path[0] if len(path) == 2 else ALL_COMMANDS, path[-1]))
    if as_json:
        print_json({"key": ".".join(path), **_json(row)})
    else:
        click.echo(line_of(row.shown))
    return _print_problems(settings)


@command.command(
    "set",
    # Accept values that start with a dash, such as -0.5.
    context_settings={"ignore_unknown_options": True},
    short_help="Change a setting for all runs.",
    examples=(
        "edgespec config set target 8b-q4",
        "edgespec config set chat.remember false",
        "edgespec config set stop '###' END",
    ),
)
@click.argument("key", shell_complete=_complete_key)
@click.argument("values", metavar="VALUE...", nargs=-1, required=True, shell_complete=_complete_value)
@json_option
@click.pass_context
def set_value(ctx: click.Context, key: str, values: tuple[str, ...], as_json: bool) -> int:
    """Write a setting to the file. Comments in the file are preserved.

    KEY is the name of an option. For example, gpu_layers applies to all commands, and chat.gpu_layers only to
    `edgespec chat`. Options that can be repeated accept several values. Use absolute paths or paths that
    start with ~, because commands may run in any folder.
    """
    path = _key_path(key)
    option = _option_at(path, ctx)
    if len(values) > 1 and not option.multiple:
        raise usage_error(f"{key} takes one value, not {len(values)}", "put the value in quotes", ctx)
    try:
        value = setting_value(path[-1], values if option.multiple else values[0])
        literal = _literal(option, values, value)
    except OptionError as error:
        raise click.UsageError(str(error), ctx) from error
    write_value(settings_path(), path, literal)
    if as_json:
        shown = list(values) if option.multiple else value
        print_json({"key": ".".join(path), "value": shown, "path": str(settings_path())})
    else:
        click.echo(printable(f"{'.'.join(path)} = {literal} in {settings_path()}"))
    variable = variable_of(path[-1])
    if os.environ.get(variable):
        note(f"The environment variable {variable} overrides the settings file.")
    _print_problems(Settings.read())
    return DONE


@command.command(
    "unset",
    short_help="Remove a setting from the file.",
    examples=("edgespec config unset target", "edgespec config unset chat.remember"),
)
@click.argument("key", shell_complete=_complete_key)
@json_option
@click.pass_context
def unset_value(ctx: click.Context, key: str, as_json: bool) -> int:
    """Remove a setting from the file so that its default applies again. Unknown names can be removed too."""
    path = _key_path(key)
    file = settings_path()
    # Look up the typed key first, because a misspelt key can contain hyphens, which `_key_path` replaces.
    removed = write_value(file, tuple(key.split(".")), None) or write_value(file, path, None)
    if not removed:
        _option_at(path, ctx)
    if as_json:
        print_json({"key": ".".join(path), "removed": removed, "path": str(file)})
    else:
        click.echo(printable(f"{'.'.join(path)} is {'no longer' if removed else 'not'} in {file}"))
    _print_problems(Settings.read())
    return DONE


def _key_path(key: str) -> KeyPath:
    return tuple(part.replace("-", "_") for part in key.split("."))


def _option_at(path: KeyPath, ctx: click.Context) -> SettingOption:
    options = every_setting()
    if len(path) == 2:
        if not (options := settings_of(path[0])):
            step = suggestion(path[0], [name for name in COMMANDS if settings_of(name)])
            raise usage_error(f"there are no settings for a command {path[0]!r}", step, ctx)
    elif len(path) > 2:
        raise usage_error(f"{'.'.join(path)!r} is not a valid key", "use a key such as chat.temperature", ctx)
    if path[-1] not in options:
        unknown = OptionError(*unknown_setting(path[-1], options), code="option_unknown")
        raise click.UsageError(str(unknown), ctx) from unknown
    return options[path[-1]]


def _literal(option: SettingOption, values: tuple[str, ...], value: Any) -> str:
    if option.multiple:
        return f"[{', '.join(map(quoted, values))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else quoted(values[0])
