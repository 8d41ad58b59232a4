"""Build command line options that several commands share from the declarations in `edgespec.options`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.help import SectionOption
from edgespec.cli.settings import SettingOption
from edgespec.method_names import DRAFTER_NAMES
from edgespec.option_kinds import Choice, Flag, Integer, Kind, MethodName, ModelName, PathName, TokenBiases
from edgespec.options import LOAD_OPTIONS, MODEL_OPTIONS, REPLY_OPTIONS, SETTINGS, Option

__all__ = [
    "MAX_SEED",
    "METHODS",
    "METHOD_NAMES",
    "MODEL_NAMES",
    "PREFIX_CACHE_NAMES",
    "SAMPLING_NAMES",
    "Decorator",
    "acceptance_option",
    "drafting_options",
    "every_setting",
    "given",
    "json_option",
    "listed",
    "method_options",
    "model_options",
    "model_reference",
    "pick",
    "planned_options",
    "prefix_cache_options",
    "reply_options",
    "sampling_options",
    "whole",
]

_Item = TypeVar("_Item")
Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _names(options: Mapping[str, Option], *groups: str) -> tuple[str, ...]:
    return tuple(name for name, each in options.items() if each.group in groups and not each.api_only)


MODEL_NAMES = (*MODEL_OPTIONS, *_names(LOAD_OPTIONS, "model", "drafting"))
PREFIX_CACHE_NAMES = _names(LOAD_OPTIONS, "prefix_cache")
METHOD_NAMES = _names(LOAD_OPTIONS, "method")
SAMPLING_NAMES = _names(REPLY_OPTIONS, "sampling")
# Methods that shell completion suggests. Other combinations are also valid.
METHODS = ("auto", "none", *DRAFTER_NAMES, "model+suffix", "layerskip+suffix", "lowbit+suffix")
MAX_SEED = (1 << 63) - 1
_HEADINGS = {
    "model": "Model options",
    "prefix_cache": "Model options",
    "drafting": "Drafting options",
    "method": "Method options",
    "sampling": "Sampling options",
    "reply": "Options",
}


def pick(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return only the options with these names."""
    return {name: options[name] for name in names if name in options}


def given(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user set, without those that have their default value."""
    return {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def _reader(kind: Kind) -> Callable[[Any], Any]:
    """Return a click type that parses this kind of value."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return kind.parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


def whole(low: int, high: int | None = None) -> Callable[[Any], int]:
    """Return a click type for whole numbers from `low` to `high`."""
    return _reader(Integer(low) if high is None else Integer(low, high))


def listed(read_item: Callable[[str], _Item]) -> Callable[[Any], tuple[_Item, ...]]:
    """Return a click type for comma-separated values."""

    def read(value: Any) -> tuple[_Item, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(read_item(part.strip()) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not a comma-separated list of values") from error

    return read


def _as_mapping(_ctx: click.Context, _param: click.Parameter, pairs: Any) -> dict[int, float]:
    return dict(pairs)


def _complete_model(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete aliases and names of models. If none matches, complete file names."""
    from edgespec.catalog import load_catalogue
    from edgespec.catalog.catalogue import user_aliases
    from edgespec.catalog.other_programs import installed_names
    from edgespec.errors import EdgespecError

    try:
        own = list(user_aliases())
    except EdgespecError:
        own = []
    known = (*own, *load_catalogue().names, *installed_names())
    names = [name for name in known if name.lower().startswith(typed.lower())]
    return [CompletionItem(name) for name in dict.fromkeys(names)] or [CompletionItem(typed, type="file")]


def _complete_method(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(method) for method in METHODS if method.startswith(typed)]


def model_reference(name: str) -> Decorator:
    """Return the argument REF, with shell completion."""
    return click.argument(name, metavar="REF", shell_complete=_complete_model)


def _all_of(options: Sequence[Decorator]) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _click_option(name: str, option: Option, *, per_run: bool = False, **changes: Any) -> Decorator:
    """Return the click option for a declaration. If `per_run` is true, ignore settings."""
    dashed = f"--{name.replace('_', '-')}"
    kind = option.kind
    names = [f"{dashed}/--no-{dashed[2:]}"] if isinstance(kind, Flag) else [*option.flags, dashed]
    default_text = f" [default: {option.default_text}]" if option.default_text else ""
    settings: dict[str, Any] = {
        "default": None if kind.repeatable else option.default,
        "help": option.help + default_text,
        "section": _HEADINGS[option.group],
        "show_default": not default_text and option.default not in (None, (), {}),
        "multiple": kind.repeatable,
    }
    if isinstance(kind, Choice):
        settings["type"] = click.Choice(kind.values)
    elif not isinstance(kind, Flag):
        settings["type"] = click.Path() if isinstance(kind, PathName) else _reader(kind)
        settings["metavar"] = kind.metavar
    if isinstance(kind, TokenBiases):
        settings["callback"] = _as_mapping
    if isinstance(kind, MethodName):
        settings["shell_complete"] = _complete_method
    if isinstance(kind, ModelName):
        settings["shell_complete"] = _complete_model
    settings |= changes
    if per_run or option.per_run:
        return click.option(*names, cls=SectionOption, **settings)
    return click.option(*names, cls=SettingOption, declaration=option, **settings)


def _from(options: Mapping[str, Option], names: Iterable[str]) -> list[Decorator]:
    return [_click_option(name, options[name]) for name in names]


model_options = _all_of(
    [*_from(MODEL_OPTIONS, MODEL_OPTIONS), *_from(LOAD_OPTIONS, _names(LOAD_OPTIONS, "model"))]
)


def drafting_options(*, remember: bool = False, measuring: bool = False) -> Decorator:
    """Return the drafting options.

    Args:
        remember: The default of `--remember`.
        measuring: Whether the command runs a benchmark. Benchmark prompts repeat, so replies are saved only
            if `--remember` is on the command line, and never because of a setting.
    """
    changes: dict[str, dict[str, Any]] = {"remember": {"default": remember, "per_run": measuring}}
    names = _names(LOAD_OPTIONS, "drafting")
    return _all_of([_click_option(name, LOAD_OPTIONS[name], **changes.get(name, {})) for name in names])


def prefix_cache_options(*, default: str) -> Decorator:
    """Return the prefix cache options. `default` is the default value of `--prefix-cache`."""
    first, *others = PREFIX_CACHE_NAMES
    return _all_of([_click_option(first, LOAD_OPTIONS[first], default=default), *_from(LOAD_OPTIONS, others)])


acceptance_option = _click_option("acceptance", LOAD_OPTIONS["acceptance"])
# Method and drafting options that affect memory use.
planned_options = _all_of(_from(LOAD_OPTIONS, ("method", "draft_branches", "draft_window", "draft_sinks")))
method_options = _all_of(_from(LOAD_OPTIONS, METHOD_NAMES))


def sampling_options(*, logit_bias: bool = True) -> Decorator:
    """Return the sampling settings."""
    names = [name for name in SAMPLING_NAMES if logit_bias or name != "logit_bias"]
    return _all_of(_from(REPLY_OPTIONS, names))


reply_options = _all_of(_from(SETTINGS, ("system", *_names(REPLY_OPTIONS, "reply"))))


def every_setting() -> dict[str, SettingOption]:
    """Return the options that can be set for all runs, keyed by name."""

    @click.command()
    @_all_of(_from(SETTINGS, SETTINGS))
    def command(**_options: Any) -> None:
        """Serve only to collect the options. Never called."""

    return {each.name: each for each in command.params if isinstance(each, SettingOption) and each.name}


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
