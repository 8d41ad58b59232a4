"""Sampling settings: what each is called, how its text is read, and what makes no sense."""

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
    """One setting: its name in the API, a label, a few words about it, and the reader of its text."""

    name: str
    label: str
    hint: str
    read: Callable[[str, str], Setting]
    is_sampling: bool = False


def parse(field: Field, text: str) -> Setting:
    """The value in `text`. Raises OptionError with the range."""
    value = field.read(field.name, text.strip())
    if field.is_sampling:
        _check_sampling(field.name, value)
    return value


def accepted(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """The settings that make sense, and one line for each that does not."""
    kept: dict[str, Setting] = {}
    problems: list[str] = []
    for name, value in settings.items():
        try:
            kept[name] = parse(field_named(name), shown(value))
        except OptionError as error:
            problems.append(error.what)
    return kept, problems


def field_named(name: str) -> Field:
    """The setting called `name` here or in other tools. Raises OptionError with the nearest name."""
    wanted = name.strip().lower().replace("-", "_")
    if wanted in ("context", "num_ctx", "ctx", "n_ctx"):
        raise OptionError("the context size is chosen at the start", "start again with --context N")
    wanted = _OTHER_NAMES.get(wanted, wanted)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    close = difflib.get_close_matches(wanted, _BY_NAME, n=1, cutoff=0.5)
    raise OptionError(
        f"there is no setting {name!r}", f"did you mean {close[0]}?" if close else "see /set for all of them"
    )


def shown(value: Setting) -> str:
    """A value as text that `parse` reads back."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list):
        return ", ".join(_escaped(item) for item in value)
    return str(value)


def default_text(field: Field) -> str:
    """The value in use when nothing is set."""
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
            f"{name} holds an empty text", "separate texts with commas; \\n is a new line, \\c a comma"
        )
    return stops


def _escaped(text: str) -> str:
    for meant, written in (("\\", "\\\\"), *_ESCAPES.items()):
        if meant != " ":
            text = text.replace(meant, written)
    # Blanks at the ends matter in a stop text, and would be stripped with those around the comma.
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
    Field("temperature", "Temperature", "0 always takes the likeliest", _number, True),
    Field("top_k", "Top k", "keep the k likeliest; 0 is off", _integer, True),
    Field("top_p", "Top p", "likeliest share kept; 1 is off", _number, True),
    Field("min_p", "Min p", "least share of the best; 0 is off", _number, True),
    Field("typical_p", "Typical p", "1 is off", _number, True),
    Field("repetition_penalty", "Repetition penalty", "1 is off", _number, True),
    Field("presence_penalty", "Presence penalty", "0 is off", _number, True),
    Field("frequency_penalty", "Frequency penalty", "0 is off", _number, True),
    Field("penalty_window", "Penalty window", "tokens penalised; -1 is all", _integer, True),
    Field("max_tokens", "Longest reply", "in tokens, within the context", _whole(1, 1 << 40)),
    Field("seed", "Seed", "same seed, same reply", _whole(0, (1 << 63) - 1)),
    Field("stop", "Stop texts", "between commas; \\n is a new line", _stops),
    Field("method", "Method", "auto, none, or names joined by +", _method),
    Field("draft_length", "Draft length", "most tokens to guess, 1 to 64", _whole(1, 64)),
    Field("acceptance", "Acceptance", "invariant or rejection", _one_of("invariant", "rejection")),
)
_BY_NAME = {field.name: field for field in FIELDS}
_OTHER_DEFAULTS = {
    "max_tokens": "8,192",
    "seed": "another each time",
    "stop": "none",
    "method": "as started",
    "draft_length": "as started",
    "acceptance": "as started",
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
