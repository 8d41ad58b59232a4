"""The `Option` class, the kinds of option values, and the options shared by `load` and replies.

Each kind parses strings and checks values passed in Python.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from errno import EFBIG
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_origin, get_type_hints

from edgespec.cluster.machines import parse_machines
from edgespec.engine.sampling_params import SettingRange, check_biases
from edgespec.errors import OptionError, about_option
from edgespec.options.methods import methods_by_need, parse_method
from edgespec.options.schemas.other_properties import closed_objects
from edgespec.options.schemas.spellings import read_schema
from edgespec.system.files import format_bytes
from edgespec.system.sizes import parse_size
from edgespec.system.spelling import nearest

__all__ = [
    "ACCEPTANCE",
    "ACCEPTANCES",
    "DRAFT_LENGTH",
    "MAX_DRAFT_LENGTH",
    "MAX_LOSS",
    "METHOD",
    "AdapterScales",
    "Adapters",
    "Branches",
    "Choice",
    "Choices",
    "ExpertPlacement",
    "Flag",
    "HeadName",
    "Integer",
    "JsonSchema",
    "Kind",
    "ListOf",
    "MethodList",
    "MethodName",
    "ModelName",
    "Number",
    "Option",
    "PathName",
    "ProjectorName",
    "SamplingNumber",
    "Size",
    "Text",
    "TextFile",
    "TextList",
    "TokenBiases",
    "WorkerList",
    "check_names",
    "checked_number",
    "converted",
    "declared_options",
]

_NO_LIMIT = (1 << 31) - 1
# Maximum number of leaves in a draft tree.
_MAX_BRANCHES = 64
# Maximum size of a text file in bytes, far more than a schema or a grammar needs. Without a limit, a path
# such as /dev/zero would exhaust memory.
_MAX_FILE_BYTES = 16 << 20
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
ACCEPTANCES = ("invariant", "rejection")
MAX_DRAFT_LENGTH = 64

Group: TypeAlias = Literal["model", "workers", "prefix_cache", "drafting", "method", "sampling", "reply"]


class Kind:
    """A kind of option value. This base class accepts any string.

    Attributes:
        metavar: Placeholder for the value in help texts.
        repeatable: Whether the option can be repeated on the command line.
    """

    metavar: str = "TEXT"
    repeatable: ClassVar[bool] = False

    def parse(self, text: str) -> Any:
        """Convert a string to a value. If that fails, return the string unchanged for `check` to reject."""
        return text

    def check(self, name: str, value: Any, /) -> Any:
        """Check and normalise a value.

        Args:
            name: The option's name for the error message, such as `top_k` or, on the command line, `--top-k`.
            value: The value to check.

        Raises:
            OptionError: The value is invalid.
        """
        return _text(name, value, "a single string")

    def json_schema(self) -> dict[str, Any]:
        """Return the value's limits as JSON Schema keywords, for the server's OpenAPI description."""
        return {}


def converted(text: str, convert: Callable[[str], Any]) -> Any:
    """Return `convert(text)`, or `text` itself if that raises ValueError."""
    try:
        return convert(text)
    except ValueError:
        return text


def _text(name: str, value: object, allowed: str) -> str:
    """Return `value` if it is a string. `allowed` describes the valid values for the error message."""
    if not isinstance(value, str):
        raise OptionError(f"{name} must be a string, not {value!r}", f"use {allowed}")
    return value


def _path(name: str, value: object, allowed: str = "one path") -> str:
    """Return a path as a string. Raises OptionError if it is neither a string nor a path object."""
    return _text(name, os.fspath(value) if isinstance(value, os.PathLike) else value, allowed)


def _as_integer(value: Any) -> int | None:
    """Return `value` as an int if it is an integer of any type but not a boolean, or else None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_number(name: str, value: object, allowed: str) -> float:
    """Return `value` as a float if it is a number and not a boolean. The caller checks the range.

    Args:
        name: The option's name, for the error message.
        value: The value to check.
        allowed: The valid range in words, for the error message.

    Raises:
        OptionError: `value` is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be a number {allowed}, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        # The integer is too large for a float. The caller's range check rejects NaN.
        return math.nan


@dataclass(frozen=True)
class Text(Kind):
    """A string that the backend validates. `hint` lists examples for the error message."""

    metavar: str = "TEXT"
    hint: str = "a single string"

    def check(self, name: str, value: Any) -> str:
        return _text(name, value, self.hint)


class ModelName(Text):
    """A model reference: a path, `user/repo:quant` or a name."""

    def check(self, name: str, value: Any) -> str:
        text = _path(name, value, self.hint)
        if isinstance(value, os.PathLike) and not os.path.isabs(text) and os.path.exists(text):
            # Without a leading `./`, a relative path could be mistaken for the name of a model or repository.
            return os.path.join(os.curdir, text)
        return text


class HeadName(Kind):
    """A reference to a head: a path, `user/repo` or a name, or `auto` or `none`."""

    metavar = "HEAD|auto|none"

    def check(self, name: str, value: Any) -> str:
        return "none" if value is None else _path(name, value)


class ProjectorName(Kind):
    """The path of a projector, or `auto` or `none`."""

    metavar = "PATH|auto|none"

    def check(self, name: str, value: Any) -> str:
        return "none" if value is None else _path(name, value)


class MethodName(Kind):
    """A method: `auto`, `none`, or drafters joined by `+`."""

    metavar = "METHOD"

    def check(self, _name: str, value: Any) -> str:
        parse_method(value)
        return str(value)


class MethodList(Kind):
    """A list of drafting methods."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError(
                f"{name} must be a list, not {value!r}", 'for example, use ["suffix", "model+ngram"]'
            )
        for method in value:
            parse_method(method)
        return tuple(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a fixed set of words."""

    values: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        if value not in self.values:
            raise OptionError(f"{name} must be one of {', '.join(self.values)}, not {value!r}")
        return str(value)

    def json_schema(self) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


class Flag(Kind):
    """A value that is True or False."""

    def parse(self, text: str) -> Any:
        word = text.lower()
        return word in _TRUE if word in _TRUE + _FALSE else text

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OptionError(f"{name} must be True or False, not {value!r}")
        return value


@dataclass(frozen=True)
class Integer(Kind):
    """An integer within inclusive bounds. `hint` is appended to the error message."""

    low: int
    high: int = _NO_LIMIT
    metavar: str = "N"
    hint: str = ""

    def parse(self, text: str) -> Any:
        return converted(text, int)

    def check(self, name: str, value: Any) -> int:
        integer = _as_integer(value)
        if integer is None or not self.low <= integer <= self.high:
            shown = value if integer is None else integer
            raise OptionError(
                f"{name} must be an integer from {self.low} to {self.high}, not {shown!r}",
                f"choose another number{self.hint}" if self.hint else "",
            )
        return integer

    def json_schema(self) -> dict[str, Any]:
        return {"minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number(Kind):
    """A number within bounds. `below_high` excludes the upper bound."""

    low: float
    high: float
    below_high: bool = False
    metavar: str = "X"

    def parse(self, text: str) -> Any:
        return converted(text, float)

    def check(self, name: str, value: Any) -> float:
        allowed = f"from {self.low:g} to {'below ' if self.below_high else ''}{self.high:g}"
        number = checked_number(name, value, allowed)
        if not self.low <= number <= self.high or (self.below_high and number == self.high):
            raise OptionError(f"{name} must be a number {allowed}, not {value!r}")
        return number


class Share(Kind):
    """A fraction from 0 to 1. The strings `2%` and `0.02` are equivalent."""

    metavar = "SHARE"

    def parse(self, text: str) -> Any:
        number = text.strip().removesuffix("%")
        return converted(text, lambda _: float(number) / (100.0 if "%" in text else 1.0))

    def check(self, name: str, value: Any) -> float:
        number = checked_number(name, value, "such as 0.02")
        if not 0.0 <= number <= 1.0:
            raise OptionError(
                f"{name} must be a fraction from 0 to 1, not {value!r}", "for example, use 2% or 0.02"
            )
        return number


class Size(Kind):
    """An amount of memory: `8GiB`, `800MB`, or a number of bytes."""

    metavar = "SIZE"

    def check(self, name: str, value: Any) -> int:
        return parse_size(name, value)


class WorkerList(Kind):
    """The machines that hold the layers of a model, such as `host:port=16GiB,local=8GiB`."""

    metavar = "ADDRESS[=SIZE],..."

    def check(self, name: str, value: Any) -> str:
        text = _text(name, value, "addresses such as 192.168.1.20:50052=16GiB,local=8GiB")
        parse_machines(name, text)
        return text


class PathName(Kind):
    """A path to a file or folder that need not exist."""

    metavar = "PATH"

    def check(self, name: str, value: Any) -> str:
        return _path(name, value)


_BRANCHES = Integer(1, _MAX_BRANCHES)
_ADAPTER_SCALE = Number(-1000.0, 1000.0)


class Adapters(Kind):
    """Paths of adapters, each with an optional scale, such as `a.gguf,b.gguf=0.5`."""

    metavar = "PATH[=SCALE],..."

    def parse(self, text: str) -> Any:
        return text.split(",")

    def check(self, name: str, value: Any) -> tuple[tuple[str, float], ...]:
        if isinstance(value, Mapping):
            pairs = list(value.items())
        else:
            given = [value] if isinstance(value, str | os.PathLike) else value
            if not isinstance(given, Sequence):
                raise OptionError(
                    f"{name} must be a path or a list of paths, not {value!r}",
                    'for example, pass "style.gguf"',
                )
            # Values that have been checked before are pairs already.
            pairs = [one if isinstance(one, tuple) else _path_and_scale(_path(name, one)) for one in given]
        return tuple(
            (
                os.path.expanduser(_path(name, path)),
                _ADAPTER_SCALE.check(f"the scale of {path}", scale),
            )
            for path, scale in pairs
        )


def _path_and_scale(text: str) -> tuple[str, float]:
    path, equals, scale = text.rpartition("=")
    if not equals or os.path.exists(text):
        return text, 1.0
    try:
        return path, float(scale)
    except ValueError:
        if not os.path.exists(os.path.expanduser(path)):
            # The equals sign is part of the file name.
            return text, 1.0
        raise OptionError(
            f"the scale {scale!r} is not a number", f"for example, use {path}=0.5, or only the path"
        ) from None


class AdapterScales(Kind):
    """The scale of each adapter, by name."""

    metavar = "NAME=SCALE"

    def check(self, name: str, value: Any) -> dict[str, float]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise OptionError(
                f"{name} must be a mapping from names to numbers, not {value!r}",
                'for example, use {"tone": 0.5}',
            )
        return {key: _ADAPTER_SCALE.check(f"the scale of {key}", scale) for key, scale in value.items()}


class Branches(Kind):
    """Number of children per draft tree node at each depth, such as `3,2`, or `auto`. Empty for a chain."""

    metavar = "auto|N,N,..."

    def parse(self, text: str) -> Any:
        return converted(text, lambda _: tuple(int(part) for part in text.split(",")))

    def check(self, name: str, value: Any) -> Any:
        if value == "auto":
            return value
        if (count := _as_integer(value)) is not None:
            value = (count,)
        if not isinstance(value, tuple | list):
            raise OptionError(
                f"{name} must be `auto` or positive integers, not {value!r}", "for example, use 3,2"
            )
        value = tuple(_BRANCHES.check(name, count) for count in value)
        if math.prod(value) > _MAX_BRANCHES:
            raise OptionError(
                f"{name} can create at most {_MAX_BRANCHES} branches, but {value!r} would create"
                f" {math.prod(value)}",
                "use smaller numbers",
            )
        return value


class ExpertPlacement(Kind):
    """Where a model's experts run: `auto`, `gpu`, `cpu`, or the number of layers that use the CPU."""

    metavar = "auto|gpu|cpu|N"
    _WORDS: ClassVar = ("auto", "gpu", "cpu")

    def parse(self, text: str) -> Any:
        return converted(text, int)

    def check(self, name: str, value: Any) -> Any:
        if value in self._WORDS:
            return value
        number = _as_integer(value)
        if number is None or not 0 <= number <= _NO_LIMIT:
            raise OptionError(
                f"{name} must be `auto`, `gpu`, `cpu` or a number of layers, not {value!r}",
                "for example, use 12",
            )
        return number


@dataclass(frozen=True)
class ListOf(Kind):
    """A comma-separated list of values of one kind."""

    item: Kind

    def parse(self, text: str) -> Any:
        return tuple(self.item.parse(part.strip()) for part in text.split(","))

    def check(self, name: str, value: Any) -> Any:
        return tuple(self.item.check(name, each) for each in value)


class TextList(Kind):
    """One or more strings, none of them empty."""

    repeatable = True

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise OptionError(f"{name} must be one or more non-empty strings, not {value!r}")
        return tuple(texts)


class Choices(TextList):
    """Strings to choose from. An empty tuple, the default, means that the option is not used."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if value == []:
            raise OptionError(
                f"{name} must be one or more non-empty strings, not []", "pass at least one string"
            )
        return super().check(name, value)


class TextFile(Kind):
    """A string. On the command line, it is read from a file."""

    metavar = "FILE"

    def parse(self, text: str) -> Any:
        """Return the text of the file at path `text`.

        Raises OptionError if it cannot be read or is too large.
        """
        try:
            # The file may be a pipe, whose size is unknown until it has been read.
            with Path(text).expanduser().open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise OSError(EFBIG, f"it is larger than {format_bytes(_MAX_FILE_BYTES)}")
            return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise OptionError(
                f"the file {text!r} cannot be read: {reason}",
                "pass the path of a text file",
                code="file_not_read",
            ) from None


class JsonSchema(TextFile):
    """A JSON schema: a dict, JSON text or a Pydantic model. `check` returns it as JSON text."""

    def parse(self, text: str) -> Any:
        """Return the JSON text of a file. Raises OptionError if it cannot be read or is not a JSON object."""
        if text.lstrip().startswith("{"):
            raise OptionError(
                f"the schema must be a file path, not JSON text: {text[:40]!r}",
                "save the schema to a file, and pass its path",
                code="constraint_invalid",
            )
        schema = super().parse(text)
        try:
            is_object = isinstance(json.loads(schema), Mapping)
        except (ValueError, RecursionError) as error:
            place = ""
            if isinstance(error, json.JSONDecodeError):
                place = f" (line {error.lineno}, column {error.colno})"
            raise OptionError(
                f"{text} is not valid JSON{place}", "fix the JSON in this file", code="constraint_invalid"
            ) from None
        if not is_object:
            raise OptionError(
                f"{text} contains {schema[:40]!r}, but a JSON schema must be a JSON object",
                "pass the path of a JSON schema file",
                code="constraint_invalid",
            )
        return schema

    def check(self, name: str, value: Any) -> str:
        hint = "pass a dict, a JSON string or a Pydantic model class"
        if isinstance(value, type):
            value = _pydantic_schema(name, value, hint)
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"{name} is not valid JSON: {error}", hint, code="constraint_invalid") from None
        if not isinstance(schema, Mapping):
            raise OptionError(
                f"{name} must be a JSON object, not {text[:40]}", hint, code="constraint_invalid"
            )
        return json.dumps(read_schema(schema, name), ensure_ascii=False)


def _pydantic_schema(name: str, model: type, hint: str) -> Any:
    from pydantic import BaseModel
    from pydantic.errors import PydanticUserError

    if not issubclass(model, BaseModel):
        raise OptionError(
            f"{name} must be a JSON schema, not the class {model.__name__}", hint, code="constraint_invalid"
        )
    try:
        # Pydantic allows undeclared properties by default, but OpenAI's library forbids them in its requests.
        return closed_objects(model.model_json_schema())
    except PydanticUserError as error:
        raise OptionError(
            f"the class {model.__name__} in {name} cannot be converted to a JSON schema: {error.message}",
            hint,
            code="constraint_invalid",
        ) from None


@dataclass(frozen=True)
class SamplingNumber(Kind):
    """A numeric sampling setting within `limits`."""

    limits: SettingRange
    metavar: str = "X"
    convert: Callable[[str], float] = float

    def parse(self, text: str) -> Any:
        return converted(text, self.convert)

    def check(self, name: str, value: Any) -> Any:
        return self.limits.check(name, value)

    def json_schema(self) -> dict[str, Any]:
        return {"minimum": self.limits.low, "maximum": self.limits.high}


class TokenBiases(Kind):
    """Numbers to add to the logits of individual tokens. Each string has the form `ID=VALUE`."""

    metavar = "ID=VALUE"
    repeatable = True

    def parse(self, text: str) -> Any:
        token, _, bias = text.partition("=")
        return converted(text, lambda _: (int(token), float(bias)))

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            wrong = next((pair for pair in value if not isinstance(pair, tuple)), None)
            if wrong is not None:
                raise OptionError(
                    f"{name} must have the form ID=VALUE, not {wrong!r}", "for example, use 1523=-2.5"
                )
            value = dict(value)
        return check_biases(name, value)


@dataclass(frozen=True)
class Option:
    """Declaration of an option.

    Attributes:
        kind: Parses and checks the value.
        group: The help section that lists the option, unless it is `common`.
        help: A description of one or two sentences for `--help` and the documentation.
        default: The default value.
        default_text: A description of the default, if the value alone is not clear.
        flags: Short forms on the command line, such as `-n`.
        common: Whether the option is one of the few that most users need. `--help` lists these first.
        per_run: Whether the option applies to a single model or run and therefore cannot be set for all runs.
        api_only: Whether the option is available only in Python.
        in_chat: The label and hint in the chat's settings form. None if the chat cannot change the option.
    """

    kind: Kind
    group: Group
    help: str
    _: KW_ONLY
    default: Any = None
    default_text: str = ""
    flags: tuple[str, ...] = ()
    common: bool = False
    per_run: bool = False
    api_only: bool = False
    in_chat: tuple[str, str] | None = None

    def check(self, name: str, value: Any) -> Any:
        """Check and normalise a value. Raises OptionError if it is invalid."""
        with about_option(name):
            return self.default if value is None and self.default is None else self.kind.check(name, value)


# fmt: off
METHOD = Option(MethodName(), "method",
    "How to speed up replies. `auto` uses the draft model and repeated text whenever that is faster. `none`"
    " turns the speed-up off. You can also name one or more methods joined by +, which are then used even if"
    " they are slower: " + ", ".join(each.name for each in methods_by_need()) + ".",
    default="auto", common=True, in_chat=("Speed-up method", "auto, none, or e.g. model+suffix"))
DRAFT_LENGTH = Option(Integer(1, MAX_DRAFT_LENGTH, metavar="K", hint=", or method none"), "method",
    f"Number of tokens that the draft model proposes at a time, from 1 to {MAX_DRAFT_LENGTH}. With `auto`,"
    " this is the maximum.",
    default_text="4; up to 16 with auto, depending on speed",
    in_chat=("Draft length", "tokens to guess at a time, 1 to 64"))
ACCEPTANCE = Option(Choice(ACCEPTANCES), "method",
    "How the model decides which proposed tokens to accept. `invariant`: the same seed gives the same reply"
    " with every method. `rejection`: every reply is as likely as without the speed-up, but the same seed"
    " can give different replies with different methods. With `auto` or several methods, it can give a"
    " different reply every time.",
    default="invariant", in_chat=("Acceptance", "invariant (same seed, same reply)"))
MAX_LOSS = Option(Share(), "drafting",
    "How much slower than normal the speed-up may make a reply in the worst case, such as 5% (plus the time"
    " for two tokens). If set, this limit also applies to methods other than `auto`.",
    default_text="2% for auto, no limit for other methods")
# fmt: on


def check_names(given: Iterable[str], known: Mapping[str, Option]) -> None:
    """Raise OptionError for the first unknown option. The message suggests the most similar name."""
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise OptionError(
                f"unknown option {name!r}",
                f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}",
                code="option_unknown",
            )


def declared_options(arguments: type) -> dict[str, Option]:
    """Return the `Option` annotations of a TypedDict, keyed by field name."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
