"""Chat settings: their names and descriptions, and how values are parsed and formatted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.chat.saved_chat import Setting
from edgespec.errors import EdgespecError, OptionError
from edgespec.options.load_options import LOAD_OPTIONS
from edgespec.options.methods import method, parse_method
from edgespec.options.option import Option
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.options.settings import MODEL_OPTIONS
from edgespec.system.spelling import FOREIGN_NAMES, nearest

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel


class Description(NamedTuple):
    """A setting's label and hint in the settings form."""

    label: str
    hint: str


_GROUPS = ("sampling", "reply", "method")
SETTINGS = {
    name: Description(*option.in_chat)
    for group in _GROUPS
    for name, option in REPLY_OPTIONS.items()
    if option.in_chat and option.group == group
}
"""The reply options that the chat offers, in the order of the settings form."""
ALL_LOAD_SETTINGS: Mapping[str, Option] = {
    name: option
    for name, option in {**MODEL_OPTIONS, **LOAD_OPTIONS}.items()
    if name != "target" and name not in REPLY_OPTIONS and not option.api_only
}
"""The load options that `/set` can change by reloading the model."""
LOAD_SETTINGS: Mapping[str, Option] = {
    name: option for name, option in ALL_LOAD_SETTINGS.items() if option.in_chat
}
"""The load options in the settings form, which shows them last."""
# The JSON schema of replies, as JSON text. /schema sets it from a file. It is not in the settings form.
SCHEMA = "schema"
_ESCAPES = {"\n": "\\n", "\t": "\\t", ",": "\\c", " ": "\\s"}


def parse(name: str, text: str) -> Setting:
    """Convert `text` to a value of the setting `name`. Raises OptionError if it is invalid."""
    if name == "stop":
        return _stops(text)
    kind = REPLY_OPTIONS[name].kind
    value: Setting = kind.check(name, kind.parse(text.lower().replace(" ", "")))
    return value


def read_schema(path: str) -> Setting:
    """Read a JSON schema from a file. Raises OptionError if it is not a regular file with a JSON schema."""
    file = os.path.expanduser(path)
    # Reading a pipe could block the chat, so accept only regular files.
    if os.path.exists(file) and not os.path.isfile(file):
        raise OptionError(
            f"{path!r} is not a regular file", "choose a JSON schema file", code="file_not_read"
        )
    kind = REPLY_OPTIONS[SCHEMA].kind
    schema: Setting = kind.check(SCHEMA, kind.parse(path))
    return schema


def accepted(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """Return the valid settings, and an error message for each invalid setting."""
    valid: dict[str, Setting] = {}
    problems: list[str] = []
    for name, value in settings.items():
        try:
            valid[name] = (
                REPLY_OPTIONS[SCHEMA].kind.check(SCHEMA, value)
                if name == SCHEMA
                else parse(setting_named(name), shown(value))
            )
        except OptionError as error:
            problems.append(error.what)
    return valid, problems


def check_settings(settings: Mapping[str, Setting], runtime: ChatModel) -> dict[str, Any]:
    """Check whether replies can be generated with these settings.

    Returns:
        The load options with which the models must first be loaded again. Empty if that is not necessary.

    Raises:
        OptionError: The loaded models do not support the settings.
    """
    needed: dict[str, Any] = {}
    if "method" in settings:
        wanted = str(settings["method"])
        try:
            runtime.method_for(wanted)
        except OptionError as error:
            names = [name for name in parse_method(wanted) if not method(name).always_loaded]
            if error.code != "method_unavailable" or set(names) <= {*runtime.drafters}:
                raise
            # The model was loaded without this method, which might be available.
            needed = {"methods": (wanted,)}
    if SCHEMA in settings:
        runtime.check_options(schema=str(settings[SCHEMA]))
    return needed


def remove_unsupported_method(
    runtime: ChatModel, *chat_settings: dict[str, Setting], methods_error: EdgespecError | None = None
) -> tuple[str, ...]:
    """Remove the setting `method` if the model does not support its value.

    Args:
        runtime: The loaded models.
        chat_settings: The settings of the chat, and those of new chats.
        methods_error: Why the models were loaded without the methods that the user chose, if they were.

    Returns:
        What happened, the reason and what to do, or an empty tuple if the setting was not removed.
    """
    why: EdgespecError | None = None
    for settings in chat_settings:
        try:
            if "method" in settings:
                runtime.method_for(str(settings["method"]))
        except OptionError as error:
            why = methods_error or error
            del settings["method"]
    return () if why is None else ("The setting method was removed", why.what, why.next_step)


def load_setting_named(name: str) -> str | None:
    """Return the load option with this edgespec, Ollama or llama.cpp name, or None if there is none."""
    wanted = name.strip().lower().replace("-", "_")
    wanted = FOREIGN_NAMES.get(wanted, wanted)
    return wanted if wanted in ALL_LOAD_SETTINGS else None


def with_load_setting(changed: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return the changed load options with one more change applied.

    The text `default` undoes a change. For an option that is not in the settings form, it chooses the
    option's own default instead, so that advice such as “omit --parallel” can be followed in the chat.

    Raises:
        OptionError: The value is invalid.
    """
    others = {each: value for each, value in changed.items() if each != name}
    option = ALL_LOAD_SETTINGS[name]
    if text == "default":
        return others if name in LOAD_SETTINGS else {**others, name: option.default}
    return {**others, name: option.check(name, option.kind.parse(text))}


def load_setting_text(name: str, changed: Mapping[str, Any]) -> str:
    """Return a load option's changed value as text for `with_load_setting`. Empty if it is unchanged."""
    if name not in changed:
        return ""
    value = changed[name]
    if value is None or value == ():
        return ALL_LOAD_SETTINGS[name].default_text or "none"
    if name == "adapter":
        return ",".join(f"{path}={scale}" for path, scale in value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value >> 20}MiB" if name == "memory" and not value % (1 << 20) else str(value)


def setting_named(name: str) -> str:
    """Return edgespec's name for a setting, given its name in edgespec, Ollama or llama.cpp.

    Raises:
        OptionError: The setting is unknown, or cannot be changed in the chat.
    """
    wanted = name.strip().lower().replace("-", "_")
    wanted = FOREIGN_NAMES.get(wanted, wanted)
    if wanted in SETTINGS:
        return wanted
    close = nearest(name, (*SETTINGS, *LOAD_SETTINGS))
    raise OptionError(
        f"Unknown setting {name!r}",
        f"Did you mean {' or '.join(close)}?" if close else "Type /show to see all settings",
        code="option_unknown",
    )


def shown(value: Setting) -> str:
    """Format a setting's value as text that `parse` can convert back."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    return ", ".join(map(_escaped, value)) if isinstance(value, list) else str(value)


def default_sampling(name: str, runtime: ChatModel) -> float:
    """Return the default value of a sampling setting, which can depend on the model."""
    defaults: Mapping[str, Any] = runtime.reply_defaults()
    value: float = defaults.get(name, REPLY_OPTIONS[name].default)
    return value


def default_source(name: str, runtime: ChatModel) -> str:
    """Return where the default value of a setting comes from, such as `default, from Ollama`."""
    recommended = runtime.recommended_sampling.get(name)
    return f"default, from {recommended.source}" if recommended else "default"


def default_text(name: str, runtime: ChatModel, settings: Mapping[str, Setting]) -> str:
    """Return the default value of a setting as text. It can depend on the model and on other settings."""
    if REPLY_OPTIONS[name].group == "sampling":
        return f"{default_sampling(name, runtime):g}"
    fixed = {"seed": "random", "stop": "none", "thinking": "auto", "method": runtime.method.requested}
    if name in fixed:
        return fixed[name]
    chosen = settings.get("method")
    defaults: dict[str, object]
    try:
        defaults = dict(runtime.reply_defaults(None if chosen is None else str(chosen)))
    except OptionError:
        # The chat's method is unavailable, so show the defaults for the method passed to `load`.
        defaults = dict(runtime.reply_defaults())
    if name not in defaults:
        option = REPLY_OPTIONS[name]
        return option.default_text or shown(option.default)
    value = defaults[name]
    if name == "draft_length" and defaults["method"] == "auto":
        return f"up to {value}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _stops(text: str) -> list[str]:
    stops = [_unescaped(item.strip()) for item in text.split(",")]
    if not all(stops):
        raise OptionError(
            "Stop strings must not be empty",
            "Separate stop strings with commas. Write \\n for a newline and \\c for a comma",
        )
    return stops


def _escaped(text: str) -> str:
    for meant, written in (("\\", "\\\\"), *_ESCAPES.items()):
        if meant != " ":
            text = text.replace(meant, written)
    # Escape leading and trailing spaces, which would otherwise be removed when the text is parsed.
    inner = text.strip(" ")
    if not inner:
        return "\\s" * len(text)
    before, _, after = text.partition(inner)
    return "\\s" * len(before) + inner + "\\s" * len(after)


def _unescaped(text: str) -> str:
    meant = {written[1:]: char for char, written in _ESCAPES.items()} | {"\\": "\\"}
    return re.sub(r"\\(n|t|s|c|\\)", lambda match: meant[match[1]], text)
