"""The settings of a chat, with their names, labels and parsers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgespec.chat.store import Setting
from edgespec.errors import OptionError

__all__ = ["FIELDS", "Field", "accepted", "default_text", "field_named", "parse", "shown"]


@dataclass(frozen=True, slots=True)
class Field:
    """A chat setting that the user can edit.

    Attributes:
        name: Name in the Python API and after `/set`.
        label: Name shown in the settings form.
        hint: A short explanation.
        read: Function that parses the user's text. Called with the setting's name and the text. Raises
            OptionError.
        is_sampling: Whether the setting is a field of `SamplingParams`.
    """

    name: str
    label: str
    hint: str
    read: Callable[[str, str], Setting]
    is_sampling: bool = False


def parse(field: Field, text: str) -> Setting:
    """Parse `text` as a value of the setting. Raises OptionError that names the valid values."""
    value = field.read(field.name, text.strip())
    if field.is_sampling:
        _check_sampling(field.name, value)
    return value


def accepted(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """Return the valid ones of the saved settings, and an error message for each invalid one."""
    kept: dict[str, Setting] = {}
    problems: list[str] = []
    for name, value in settings.items():
        try:
            kept[name] = parse(field_named(name), shown(value))
        except OptionError as error:
            problems.append(error.what)
    return kept, problems


def field_named(name: str) -> Field:
    """Return the setting with this name, as edgespec or a similar tool calls it. Raises OptionError."""
    wanted = name.strip().lower().replace("-", "_")
    if wanted in ("context", "num_ctx", "ctx", "n_ctx"):
        raise OptionError(
            "the context size cannot change while a model is loaded", "quit and start again with --context N"
        )
    wanted = _OTHER_NAMES.get(wanted, wanted)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    close = difflib.get_close_matches(wanted, _BY_NAME, n=1, cutoff=0.5)
    raise OptionError(
        f"there is no setting {name!r}",
        f"did you mean {close[0]}?" if close else "type /set to see all settings",
    )


def shown(value: Setting) -> str:
    """Format a value as text that `parse` accepts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list):
        return ", ".join(_escaped(item) for item in value)
    return str(value)


def default_text(field: Field) -> str:
    """Return the default value of a setting as text."""
    if field.is_sampling:
        from edgespec import SamplingParams

        value = getattr(SamplingParams(), field.name)
        return f"{value:g}"
    return _OTHER_DEFAULTS[field.name]


def _check_sampling(name: str, value: Setting) -> None:
    from edgespec import SamplingParams

    arguments: dict[str, object] = {name: value}
    SamplingParams(**arguments)  # type: ignore[arg-type]


def _whole(low: int, high: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise OptionError(f"{name} is {text[:40]!r}", "give a whole number") from None
        if not low <= value <= high:
            raise OptionError(f"{name} is {value}", f"give a whole number from {low} to {high}")
        return value

    return read


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name} is {text[:40]!r}", "give a whole number") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{name} is {text[:40]!r}", "give a number such as 0.8") from None


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise OptionError(f"{name} is {text[:40]!r}", f"give {' or '.join(choices)}")
        return text.lower()

    return read


def _method(name: str, text: str) -> str:
    parts = text.lower().replace(" ", "").split("+")
    if not all(part.replace("-", "").isalnum() for part in parts):
        raise OptionError(f"{name} is {text[:40]!r}", "give auto, none, or drafters joined by +")
    return "+".join(parts)


def _stops(name: str, text: str) -> list[str]:
    stops = [_unescaped(item.strip()) for item in text.split(",")]
    if not all(stops):
        raise OptionError(
            f"{name} contains an empty text",
            "separate texts with commas; write \\n for a new line, \\c for a comma",
        )
    return stops


def _escaped(text: str) -> str:
    for meant, written in (("\\", "\\\\"), *_ESCAPES.items()):
        if meant != " ":
            text = text.replace(meant, written)
    # Spaces at the ends of a stop string are escaped, because spaces around commas are stripped.
    inner = text.strip(" ")
    if not inner:
        return "\\s" * len(text)
    before, _, after = text.partition(inner)
    return "\\s" * len(before) + inner + "\\s" * len(after)


def _unescaped(text: str) -> str:
    meant = {written[1:]: char for char, written in _ESCAPES.items()} | {"\\": "\\"}
    return re.sub(r"\\(n|t|s|c|\\)", lambda match: meant[match[1]], text)


_ESCAPES = {"\n": "\\n", "\t": "\\t", ",": "\\c", " ": "\\s"}

FIELDS = (
    Field("temperature", "Temperature", "0: always the likeliest word", _number, True),
    Field("top_k", "Top k", "only the k likeliest; 0 is off", _integer, True),
    Field("top_p", "Top p", "only the likeliest part; 1 is off", _number, True),
    Field("min_p", "Min p", "at least this likely; 0 is off", _number, True),
    Field("typical_p", "Typical p", "only typical words; 1 is off", _number, True),
    Field("repetition_penalty", "Repetition penalty", "against repetition; 1 is off", _number, True),
    Field("presence_penalty", "Presence penalty", "against used words; 0 is off", _number, True),
    Field("frequency_penalty", "Frequency penalty", "against frequent words; 0 is off", _number, True),
    Field("penalty_window", "Penalty window", "last tokens penalised; -1 is all", _integer, True),
    Field("max_tokens", "Maximum length", "of a reply, in tokens", _whole(1, 1 << 40)),
    Field("seed", "Seed", "same seed, same reply", _whole(0, (1 << 63) - 1)),
    Field("stop", "Stop texts", "separated by commas", _stops),
    Field("method", "Speed-up method", "auto, none, or e.g. model+suffix", _method),
    Field("draft_length", "Draft length", "tokens guessed at once, 1 to 64", _whole(1, 64)),
    Field("acceptance", "Acceptance", "invariant or rejection", _one_of("invariant", "rejection")),
)
_BY_NAME = {field.name: field for field in FIELDS}
_OTHER_DEFAULTS = {
    "max_tokens": "8,192",
    "seed": "random",
    "stop": "none",
    "method": "as at start",
    "draft_length": "as at start",
    "acceptance": "as at start",
}
_OTHER_NAMES = {
    "temp": "temperature",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "typical": "typical_p",
    "stops": "stop",
}
