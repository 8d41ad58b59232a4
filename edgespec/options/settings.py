"""All options of `load`, `plan` and the reply functions.

These declarations define the keyword arguments of the Python API, the command line options, the settings
file's keys, the EDGESPEC_ environment variables and the table in the documentation.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from edgespec.errors import OptionError
from edgespec.options.default_model import default_model
from edgespec.options.load_options import LOAD_OPTIONS, LoadArguments
from edgespec.options.methods import parse_method, readers_of
from edgespec.options.option import ACCEPTANCES, MAX_DRAFT_LENGTH, ModelName, Option, Text, check_names
from edgespec.options.reply_options import REPLY_OPTIONS, ReplyArguments
from edgespec.system.spelling import nearest

__all__ = [
    "ACCEPTANCES",
    "LOAD_OPTIONS",
    "MAX_DRAFT_LENGTH",
    "MODEL_OPTIONS",
    "REPLY_OPTIONS",
    "SETTINGS",
    "LoadArguments",
    "Option",
    "ReplyArguments",
    "as_bytes",
    "check_load_arguments",
    "load_arguments_for_another_model",
    "setting_value",
    "unknown_setting",
    "unread_options",
]

# Maximum number of characters of an unknown name that messages quote.
_MAX_NAME = 60
_REFERENCE = "a path, user/repo:quant or a name such as demo"
# fmt: off
MODEL_OPTIONS: Mapping[str, Option] = MappingProxyType({
    "target": Option(ModelName("MODEL", _REFERENCE), "model",
        "The model to run: a name from `edgespec models list`, user/repo:quant on Hugging Face, a .gguf file,"
        " or a folder with an MLX model.",
        default=default_model(), default_text="smollm2, or demo if smollm2 is not installed", common=True),
    "draft": Option(ModelName("MODEL|auto|none", f"auto, none, {_REFERENCE}"), "model",
        "The draft model: a small, fast model that proposes tokens, which the main model checks. `auto`"
        " chooses the best one on this machine (see `edgespec models show`); `none` runs without one.",
        default="auto", common=True, in_chat=("Draft model", "a model's name, auto or none")),
})
# fmt: on
"""The target and the draft model, which `load` and `plan` take as positional arguments."""

SETTINGS: Mapping[str, Option] = MappingProxyType(
    {
        name: option
        for options in (
            MODEL_OPTIONS,
            LOAD_OPTIONS,
            {"system": Option(Text(), "reply", "System prompt for the model.", common=True)},
            REPLY_OPTIONS,
        )
        for name, option in options.items()
        if not (option.per_run or option.api_only)
    }
)
"""The options that can be set for all runs, in the settings file or the environment."""


def unknown_setting(name: str, known: Iterable[str] | None = None) -> tuple[str, str]:
    """Return why a setting cannot be set for all runs, and what to do instead.

    Args:
        name: The name that the user wrote.
        known: The settings to suggest. Defaults to all of them.
    """
    option = {**LOAD_OPTIONS, **REPLY_OPTIONS}.get(name)
    if option and option.per_run:
        flag = f"--{name.replace('_', '-')}"
        return (
            f"{name} applies to a single model or run, so it cannot be a setting",
            f"use {flag} when you need it",
        )
    near = nearest(name, SETTINGS if known is None else known)
    advice = f"did you mean {' or '.join(near)}?" if near else "`edgespec config` shows all settings"
    return f"there is no setting {name[:_MAX_NAME]!r}", advice


def check_load_arguments(given: Mapping[str, Any]) -> LoadArguments:
    """Check and normalise the options of `load`, and fill in the defaults.

    Raises:
        OptionError: An option is unknown, invalid, or not used by any of the chosen drafters.
    """
    check_names(given, LOAD_OPTIONS)
    values = {
        name: option.check(name, given[name]) if name in given else option.default
        for name, option in LOAD_OPTIONS.items()
    }
    arguments = cast(LoadArguments, values)
    methods = (arguments["method"], *arguments["methods"])
    ignored = unread_options(methods)
    for name in ignored:
        option = LOAD_OPTIONS[name]
        if values[name] != option.default:
            automatic = () if name in unread_options(("auto",)) else ("auto",)
            raise OptionError(
                f"{name} has no effect with method {', '.join(dict.fromkeys(methods))}",
                "remove it, or choose a method that uses it, such as"
                f" {', '.join((*automatic, *readers_of(name)))}",
                option=name,
                code="option_without_effect",
            )
    return arguments


def load_arguments_for_another_model(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for loading another model with the same settings.

    Args:
        arguments: The arguments that the current model was loaded with, including `draft`.

    Returns:
        The arguments, excluding `target`. Drafting stays off if it was off, and otherwise becomes automatic.
    """
    named = arguments.get("method", "auto") not in ("auto", "none")
    own = {
        name: value
        for name, value in arguments.items()
        if (option := LOAD_OPTIONS.get(name))
        and not (option.per_run or name == "head")
        and not (named and (readers_of(name) or name == "method"))
    }
    return {**own, "draft": "none" if arguments.get("draft") in (None, "none") else "auto"}


def as_bytes(size: str | int | None) -> int | None:
    """Narrow the type of a size that `check_load_arguments` has already converted to bytes."""
    return None if size is None else int(size)


def setting_value(name: str, given: Any) -> Any:
    """Convert and check the value of a setting, given as a TOML value or a string.

    Raises:
        OptionError: The value is invalid.
    """
    option = SETTINGS[name]
    several = isinstance(given, list | tuple)
    items = [
        option.kind.parse(item) if isinstance(item, str) else item for item in (given if several else [given])
    ]
    value = tuple(items) if several or option.kind.repeatable else items[0]
    option.check(name, value)
    return value


def unread_options(methods: Iterable[str]) -> list[str]:
    """Return the options that no drafter in `methods` uses. Raises OptionError for an unknown method."""
    drafters = {name for method in methods for name in parse_method(method)}
    return [name for name in LOAD_OPTIONS if (readers := readers_of(name)) and drafters.isdisjoint(readers)]
