"""Base classes for request bodies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    TypeAdapter,
    WithJsonSchema,
    create_model,
    model_validator,
)

from edgespec.errors import OptionError
from edgespec.options.option import TokenBiases
from edgespec.options.settings import LOAD_OPTIONS, REPLY_OPTIONS, Option, ReplyArguments
from edgespec.server.errors import invalid_request
from edgespec.server.leniency.values import (
    Repair,
    asks_for_constraint,
    repair_for,
    token_biases,
)
from edgespec.system.spelling import FOREIGN_NAMES

__all__ = [
    "Ignored",
    "ItemFields",
    "MaxTokensOrZero",
    "Off",
    "One",
    "ReplyFields",
    "RequestFields",
    "reply_options",
    "require_fields",
]

_IGNORED = object()
Ignored = Annotated[Any, Field(default=None, description="Accepted, but ignored."), _IGNORED]
"""The type of fields that are safe to ignore, because the reply still meets the client's expectations."""


def _require(neutral: int, value: Any, name: str | None) -> Any:
    """Return `value` if it is None or neutral. Raise OptionError otherwise."""
    if value is not None and value != neutral:
        raise OptionError(
            f"{name} {value!r} is not supported",
            f"leave {name} out, or set it to {neutral}",
            code="option_not_supported",
        )
    return value


Off = Annotated[Ignored, AfterValidator(lambda value, info: _require(0, value, info.field_name))]
"""The type of an unsupported field that may only be 0 or false. Other values are rejected."""
One = Annotated[Ignored, AfterValidator(lambda value, info: _require(1, value, info.field_name))]
"""The type of an unsupported field that may only be 1 or true. Other values are rejected."""

# Maximum number of unknown fields in an object, and maximum length of their names in characters. These limits
# bound the time spent comparing names and the size of the list of ignored fields.
_MAX_UNKNOWN_FIELDS, _MAX_NAME_CHARACTERS = 20, 64
# Maximum number of items to search for ignored fields. The limit was chosen to bound the search time.
_MAX_SEARCHED_ITEMS = 1000
# Minimum `difflib` similarity at which an unknown name, such as `max_token`, counts as a misspelling.
_MISSPELT_SIMILARITY = 0.8


class _Fields(BaseModel):
    """A JSON object, validated strictly. Numbers, for example, are not converted to strings."""

    model_config = ConfigDict(strict=True)

    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that `ignored_fields` omits, because the server honours them or returned them itself."""

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets, including those in nested objects."""
        return [*self._own_ignored_fields(), *_ignored_below(self)]

    def _own_ignored_fields(self) -> list[str]:
        known = [
            name
            for name, info in type(self).model_fields.items()
            if _IGNORED in info.metadata and getattr(self, name) is not None
        ]
        extra = [name for name, value in (self.model_extra or {}).items() if value is not None]
        return [name for name in (*known, *extra) if name not in self.unlisted]

    @model_validator(mode="before")
    @classmethod
    def _repair_values(cls, data: Any) -> Any:
        """Normalise values that other languages serialise differently, such as `[]` for an empty map."""
        repairs = _repairs(cls)
        if not repairs or not isinstance(data, dict):
            return data
        return {name: repairs[name](value) if name in repairs else value for name, value in data.items()}


class ItemFields(_Fields):
    """An item in a conversation, such as a message. Unknown fields are ignored.

    A request can contain many items, so they must be cheap to validate.
    """

    model_config = ConfigDict(extra="allow")


class RequestFields(_Fields):
    """A JSON object in a request.

    Unknown fields are ignored and listed in `ignored_fields`, because programs send fields that only some
    servers support. However, misspelt names, names in `advice` and load options are rejected, because the
    client expects them to have an effect.
    """

    model_config = ConfigDict(extra="forbid")

    # Declared here rather than in `_Fields`, because private attributes slow down validation.
    _ignored: list[str] = PrivateAttr(default_factory=list)

    ignores_unknown: ClassVar[bool] = True
    """Whether to ignore unknown fields. If not, they are rejected unless they are null."""

    advice: ClassVar[Mapping[str, str]] = {}
    """Advice for fields that only other endpoints support, keyed by field name."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Maps fields of other APIs to the equivalent fields here, in addition to `FOREIGN_NAMES`."""

    prompt_field: ClassVar[str] = "messages"
    """Name of the field that contains the prompt, for error messages about the prompt's length."""

    @classmethod
    def known_fields(cls) -> list[str]:
        """Return the JSON names of all fields."""
        return [info.alias or name for name, info in cls.model_fields.items()]

    def _own_ignored_fields(self) -> list[str]:
        return [*super()._own_ignored_fields(), *self._ignored]

    @model_validator(mode="wrap")
    @classmethod
    def _set_unknown_fields_aside(
        cls, data: Any, handler: ModelWrapValidatorHandler[RequestFields]
    ) -> RequestFields:
        known = _names(cls)
        if not isinstance(data, dict) or data.keys() <= known:
            return handler(data)
        # Programs in Go, C# and PHP send empty values for fields that they do not set.
        given = {
            name: value
            for name, value in data.items()
            if name in known or not (value is None or (name in cls.advice and value in ("", [], {})))
        }
        unknown = [name for name in given if name not in known]
        if not cls.ignores_unknown or len(unknown) > _MAX_UNKNOWN_FIELDS:
            return handler(given)
        ignored = []
        for name in unknown:
            option = cls.other_names.get(name) or FOREIGN_NAMES.get(name, name)
            if option in known and option not in given:
                given[option] = given.pop(name)
            elif not (cls._is_refused(name, option) or asks_for_constraint(name, given[name])):
                ignored.append(name)
                del given[name]
        fields = handler(given)
        fields._ignored = ignored
        return fields

    @classmethod
    def _is_refused(cls, name: str, option: str) -> bool:
        # Strip the prefix of Ollama's nested fields, such as `options.num_predict`.
        known = [each.rpartition(".")[2] for each in cls.known_fields()]
        return (
            len(name) > _MAX_NAME_CHARACTERS
            or name in cls.advice
            or name == "keep_alive"
            or option in (*LOAD_OPTIONS, *known)
            or bool(get_close_matches(name.lower().replace("-", "_"), known, 1, _MISSPELT_SIMILARITY))
        )


@cache
def _names(fields: type[RequestFields]) -> frozenset[str]:
    return frozenset(fields.known_fields())


@cache
def _repairs(fields: type[_Fields]) -> dict[str, Repair]:
    """Return the functions that repair a class's field values, keyed by the field's JSON name."""
    repairs = {
        info.alias or name: repair_for(name, info.annotation) for name, info in fields.model_fields.items()
    }
    return {name: repair for name, repair in repairs.items() if repair}


def _ignored_below(fields: _Fields) -> list[str]:
    """Return the ignored fields in nested objects and lists.

    If several items of a list contain the same field, only the first one is listed.
    """
    first: dict[str, str] = {}
    # Each entry is an object, its path, and its path without list indices.
    waiting: deque[tuple[_Fields, str, str]] = deque([(fields, "", "")])
    searched = 0
    while waiting and searched < _MAX_SEARCHED_ITEMS:
        each, place, kind = waiting.popleft()
        searched += 1
        if place:
            for name in each._own_ignored_fields():
                shown = name[:_MAX_NAME_CHARACTERS]
                first.setdefault(f"{kind}{shown}", f"{place}{shown}")
        for name, info in type(each).model_fields.items():
            value, at = getattr(each, name), info.alias or name
            if isinstance(value, _Fields):
                waiting.append((value, f"{place}{at}.", f"{kind}{at}."))
            elif isinstance(value, list) and value and isinstance(value[0], _Fields):
                waiting.extend(
                    (item, f"{place}{at}.{index}.", f"{kind}{at}.*.")
                    for index, item in enumerate(value[: _MAX_SEARCHED_ITEMS - len(waiting)])
                )
    return list(first.values())[:_MAX_UNKNOWN_FIELDS]


# Maximum number of entries in a list or object. This limit bounds the validation time.
_MAX_ENTRIES = 10_000
# Value of `min_tokens` for replies that end only at `max_tokens`.
_NO_END_TOKENS = (1 << 63) - 1
# Options for which -1 means the default, as in llama.cpp and LM Studio.
_MINUS_ONE_IS_DEFAULT = ("max_tokens", "seed")


def _reply_field(name: str, option: Option, hint: Any) -> Any:
    """Return the type and default of a request field, derived from the option's declaration.

    The option itself validates the value, because pydantic would collect an error for every list item.
    """
    # Leave out classes, which the Python API accepts as schemas but JSON cannot contain.
    types = tuple(each for each in get_args(hint | None) if each is not type)
    adapter: TypeAdapter[Any] = TypeAdapter(Union[types])  # type: ignore[arg-type]  # noqa: UP007
    schema = adapter.json_schema() | option.kind.json_schema()
    repair = repair_for(name, Union[types])  # noqa: UP007
    minus_one = name in _MINUS_ONE_IS_DEFAULT
    if minus_one:
        schema["anyOf"] = [
            {"type": "integer", "minimum": schema.pop("minimum")},
            {"const": -1},
            {"type": "null"},
        ]

    def check(value: Any) -> Any:
        value = repair(value) if repair else value
        if value is None:
            return None
        if isinstance(value, list | dict) and len(value) > _MAX_ENTRIES:
            raise OptionError(
                f"{name} has {len(value):,} entries", f"use at most {_MAX_ENTRIES:,}", code="input_too_large"
            )
        if isinstance(option.kind, TokenBiases):
            value = token_biases(value)
        return option.check(name, value)

    schema["description"] = option.help
    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)], Field(default=None, alias=name)


def _reply_fields() -> dict[str, Any]:
    hints = get_type_hints(ReplyArguments)
    return {
        _attribute(name): _reply_field(name, option, hints[name]) for name, option in REPLY_OPTIONS.items()
    }


def _attribute(name: str) -> str:
    return f"{name}_" if name in dir(BaseModel) else name


_REPLY_FIELDS = _reply_fields()
_MAX_TOKENS = REPLY_OPTIONS["max_tokens"]

if TYPE_CHECKING:
    MaxTokensOrZero = int | None

    class ReplyFields(RequestFields):
        """Request fields for the reply options, under their edgespec names."""

        ignore_eos: bool | None = None

else:
    MaxTokensOrZero, _ = _reply_field(
        "max_tokens", replace(_MAX_TOKENS, kind=replace(_MAX_TOKENS.kind, low=0)), int | None
    )
    _ignore_eos = Field(default=None, description="true generates as many tokens as max_tokens allows.")
    ReplyFields = create_model(
        "ReplyFields", __base__=RequestFields, ignore_eos=(bool | None, _ignore_eos), **_REPLY_FIELDS
    )


def reply_options(fields: ReplyFields) -> dict[str, Any]:
    """Return the reply options that the request sets."""
    values = {name: getattr(fields, _attribute(name)) for name in REPLY_OPTIONS}
    if fields.ignore_eos:
        values["min_tokens"] = _NO_END_TOKENS
    return {name: value for name, value in values.items() if value is not None}


def require_fields(place: str, given: BaseModel, names: Sequence[str]) -> None:
    """Raise ApiError if one of the fields in `names` is missing."""
    for name in names:
        if getattr(given, name) is None:
            raise invalid_request(
                f"{place}.{name} is missing; add this field", param=f"{place}.{name}", code="missing_field"
            )
