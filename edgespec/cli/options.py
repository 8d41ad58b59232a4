"""Generate the command line options from the declarations in `edgespec.options.settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.help import SectionOption
from edgespec.cli.settings import SettingOption, use_preset
from edgespec.options.default_model import why_toy
from edgespec.options.methods import method_names, methods_by_need
from edgespec.options.option import (
    Choice,
    Flag,
    HeadName,
    Kind,
    MethodName,
    ModelName,
    PathName,
    Text,
    TextList,
)
from edgespec.options.presets import preset_names
from edgespec.options.settings import LOAD_OPTIONS, MODEL_OPTIONS, REPLY_OPTIONS, SETTINGS, Option
from edgespec.system.stdio import check_utf8

__all__ = [
    "LOAD_NAMES",
    "METHODS",
    "METHOD_NAMES",
    "MODEL_NAMES",
    "PREFIX_CACHE_NAMES",
    "REPLY_NAMES",
    "SAMPLING_NAMES",
    "WORKER_NAMES",
    "KindType",
    "OutputPath",
    "PromptText",
    "declared_options",
    "drop_sampling_defaults",
    "every_setting",
    "head_reference",
    "json_option",
    "model_reference",
    "pick",
    "preset_option",
]

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _names(options: Mapping[str, Option], *groups: str) -> tuple[str, ...]:
    return tuple(name for name, each in options.items() if each.group in groups and not each.api_only)


MODEL_NAMES = (*MODEL_OPTIONS, *_names(LOAD_OPTIONS, "model"), *_names(LOAD_OPTIONS, "drafting"))
PREFIX_CACHE_NAMES = _names(LOAD_OPTIONS, "prefix_cache")
WORKER_NAMES = _names(LOAD_OPTIONS, "workers")
METHOD_NAMES = _names(LOAD_OPTIONS, "method")
LOAD_NAMES = (*MODEL_NAMES, *METHOD_NAMES, *PREFIX_CACHE_NAMES)
SAMPLING_NAMES = _names(REPLY_OPTIONS, "sampling")
REPLY_NAMES = (*_names(REPLY_OPTIONS, "reply"), *SAMPLING_NAMES)
_MODELS = [each.name for each in methods_by_need() if each.runs_model and each.needs != "head"]
METHODS = ("auto", "none", *method_names(), *(f"{name}+suffix" for name in _MODELS))
_DECLARATIONS = {**MODEL_OPTIONS, **LOAD_OPTIONS, **SETTINGS, **REPLY_OPTIONS}
_HEADINGS = {
    "reply": "Reply and sampling",
    "sampling": "Reply and sampling",
    "model": "Memory and hardware",
    "workers": "Memory and hardware",
    "method": "Speed-up",
    "drafting": "Speed-up",
    "prefix_cache": "Cache of earlier chats",
}


def pick(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of `options` whose names are in `names`."""
    return {name: options[name] for name in names if name in options}


class KindType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The click parameter type for a kind of option value."""

    name = "value"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Parse and check a command line string. Values from settings are already parsed.

        Returns the parsed value rather than the checked one. Loading a model checks it again, and `Adapters`
        and `Size` do not accept every value that their own checks return.
        """
        if isinstance(value, str):
            if isinstance(self.kind, Text | TextList) and not isinstance(self.kind, ModelName):
                check_utf8(str(param.opts[-1] if param is not None else self.kind.metavar), value)
            value = self.kind.parse(value)
            if param is not None and not self.kind.repeatable:
                self.kind.check(param.opts[-1], value)
        return value


class PromptText(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The click parameter type for text that is passed to the model."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return check_utf8("the prompt", value)


class OutputPath(click.Path):
    """The click parameter type for the path of a new file or folder.

    Rejects an empty string, for example from an unset shell variable, because it would refer to the current
    folder.

    Args:
        example: Path to suggest when a required option is missing.
        settings: Other arguments for `click.Path`.
    """

    def __init__(self, *, example: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self._example = example

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:  # noqa: ARG002
        """Return a hint on what to type when the option is missing."""
        kind = "file" if self.file_okay else "folder"
        return f"Add a new {kind}, such as `{param.opts[-1]} {self._example}`" if self._example else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


def _complete_model(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete model names and aliases. If none match, complete file names."""
    from edgespec.errors import EdgespecError
    from edgespec.store.catalogue import load_catalogue, user_aliases
    from edgespec.store.reference import installed_names

    try:
        own = list(user_aliases())
    except EdgespecError:
        own = []
    entries = (entry for entry in load_catalogue().entries if entry.file_format.runs_here)
    listed = (name.lower() for entry in entries for name in (entry.name, *entry.aliases))
    known = (*own, *listed, *installed_names())
    return _complete_name(known, typed)


def _complete_head(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of published heads. If none match, complete file names."""
    from edgespec.store.catalogue import load_catalogue

    return _complete_name([head.name for head in load_catalogue().heads], typed)


def _complete_name(known: Iterable[str], typed: str) -> list[CompletionItem]:
    names = [name for name in known if name.lower().startswith(typed.lower())]
    return [CompletionItem(name) for name in dict.fromkeys(names)] or [CompletionItem(typed, type="file")]


def _complete_method(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(method) for method in METHODS if method.startswith(typed)]


_COMPLETERS = {ModelName: _complete_model, HeadName: _complete_head, MethodName: _complete_method}


def model_reference(name: str) -> Decorator:
    """Return a decorator that adds the MODEL argument: a model reference with shell completion."""
    return click.argument(name, metavar="MODEL", shell_complete=_complete_model)


def head_reference(name: str) -> Decorator:
    """Return a decorator that adds the HEAD argument: a reference to a head, with shell completion."""
    return click.argument(name, metavar="HEAD", shell_complete=_complete_head)


def _say_why_toy(ctx: click.Context, param: click.Parameter, target: str) -> str:
    """Print a note if the user named no model and only the tiny demo model is available."""
    is_default = ctx.get_parameter_source(str(param.name)) is ParameterSource.DEFAULT
    if is_default and not ctx.resilient_parsing and (reason := why_toy(target)):
        from edgespec.cli.screen import note
        from edgespec.system.installation import setup_command

        note(f"{reason}, so this is {target}, a tiny test model; to install it, run {setup_command()}")
    return target


def drop_sampling_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current command's options without the sampling settings that the user has not set.

    The model may have its own defaults for them.
    """
    ctx = click.get_current_context()
    return {
        name: value
        for name, value in options.items()
        if name not in SAMPLING_NAMES or ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def _option(name: str, option: Option, default: Any, *, per_run: bool) -> click.Option:
    dashed = f"--{name.replace('_', '-')}"
    kind = option.kind
    words = option.default_text
    if not words and default not in (None, (), {}):
        words = ("on" if default else "off") if isinstance(kind, Flag) else str(default)
    settings: dict[str, Any] = {
        "default": None if kind.repeatable else default,
        "help": f"{option.help} [default: {words}]" if words else option.help,
        "section": "Options" if option.common else _HEADINGS[option.group],
    }
    if isinstance(kind, Flag):
        names = [f"{dashed}/--no-{dashed[2:]}"]
    else:
        names = [*option.flags, dashed]
        settings["metavar"] = kind.metavar
        settings["type"] = click.Path() if isinstance(kind, PathName) else KindType(kind)
    if isinstance(kind, Choice):
        del settings["metavar"]
        settings["type"] = click.Choice(kind.values)
    if kind.repeatable:
        settings["multiple"] = True
        settings["callback"] = lambda _ctx, param, values: kind.check(param.opts[-1], values)
    if name == "target":
        settings["callback"] = _say_why_toy
    for kind_class, complete in _COMPLETERS.items():
        if isinstance(kind, kind_class):
            settings["shell_complete"] = complete
    if per_run or option.per_run:
        return SectionOption(names, **settings)
    return SettingOption(names, declaration=option, **settings)


def declared_options(
    *names: str, per_run: Iterable[str] = (), defaults: Mapping[str, Any] | None = None
) -> list[click.Parameter]:
    """Return the command line options with these names.

    Args:
        names: Names of declared options.
        per_run: Names of options that ignore the settings file and the environment.
        defaults: Defaults that differ from the declared defaults.
    """
    defaults = defaults or {}
    return [
        _option(name, option, defaults.get(name, option.default), per_run=name in per_run)
        for name in dict.fromkeys(names)
        for option in (_DECLARATIONS[name],)
    ]


def every_setting() -> dict[str, SettingOption]:
    """Return the options that can be set for all runs, keyed by name."""
    options = declared_options(*SETTINGS)
    return {each.name: each for each in options if isinstance(each, SettingOption) and each.name}


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def _use_preset(ctx: click.Context, _param: click.Parameter, name: str | None) -> None:
    if name is not None and not ctx.resilient_parsing:
        use_preset(ctx, name)


def _complete_preset(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in preset_names() if name.startswith(typed)]


# Make the option eager so that click processes it first, because the preset changes the defaults of other
# options.
preset_option: Decorator = click.option(
    "--preset", metavar="NAME", is_eager=True, expose_value=False, callback=_use_preset,
    shell_complete=_complete_preset,
    help="Use the system prompt, model and settings saved under this name. Other options override it.",
)  # fmt: skip
