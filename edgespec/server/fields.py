"""Base classes of the request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from edgespec.options import LOAD_OPTIONS, REPLY_OPTIONS, Option, ReplyArguments
from edgespec.reply_option_kinds import TokenBiases
from edgespec.server.errors import invalid_request
from edgespec.spelling import FOREIGN_NAMES

__all__ = [
    "Ignored",
    "ItemFields",
    "Off",
    "One",
    "ReplyFields",
    "RequestFields",
    "combined_options",
    "ignored_in_messages",
    "reply_options",
    "require_fields",
]

_IGNORED = object()
Ignored = Annotated[Any, Field(default=None, description="Accepted, but ignored."), _IGNORED]
"""The type of a field that can be ignored without changing what the client expects from the reply."""


def _require(neutral: int, value: Any, name: str | None) -> Any:
    """Raise OptionError unless an option has its neutral value, which has no effect."""
    if value is not None and value != neutral:
        raise OptionError(f"{name} {value!r} is not supported", f"leave {name} out, or set it to {neutral}")
    return value


Off = Annotated[Ignored, AfterValidator(lambda value, info: _require(0, value, info.field_name))]
"""The type of a field for a feature that edgespec does not have. It is ignored if it is 0 or false."""
One = Annotated[Ignored, AfterValidator(lambda value, info: _require(1, value, info.field_name))]
"""The type of a field for a feature that edgespec does not have. It is ignored if it is 1 or true."""

# Maximum number of unknown fields in an object, and of characters in their names. Bounds the time to compare
# them with known names, and the size of the list of ignored fields.
_MAX_UNKNOWN_FIELDS, _MAX_NAME_CHARACTERS = 20, 64
# Maximum number of items whose ignored fields are listed, to bound the time. Chosen.
_MAX_SEARCHED_ITEMS = 1000
# Similarity (`difflib`) from which on an unknown name is probably a misspelt one, such as `max_token`.
_MISSPELT_SIMILARITY = 0.8


class _Fields(BaseModel):
    """A JSON object. Numbers are not converted to strings."""

    model_config = ConfigDict(strict=True)

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets."""
        known = [
            name
            for name, info in type(self).model_fields.items()
            if _IGNORED in info.metadata and getattr(self, name) is not None
        ]
        extra = (self.model_extra or {}).items()
        return [*known, *(name for name, value in extra if value is not None)]


class ItemFields(_Fields):
    """An item of a conversation, such as a message. Unknown fields are ignored.

    A request can have many items, so they must be cheap to validate.
    """

    model_config = ConfigDict(extra="allow")


class RequestFields(_Fields):
    """A JSON object in a request.

    Unknown fields are rejected unless they are null, or unless the class ignores them.
    """

    model_config = ConfigDict(extra="forbid")

    # Not in `_Fields`, because private attributes make validation slower.
    _ignored: list[str] = PrivateAttr(default_factory=list)

    ignores_unknown: ClassVar[bool] = False
    """Whether to ignore unknown fields and to list them in `ignored_fields`.

    Programs send fields that only some servers know. Misspelt names, names in `advice` and options that are
    set when a model is loaded are rejected nevertheless, because the client expects them to have an effect.
    """

    advice: ClassVar[Mapping[str, str]] = {}
    """What to do instead of setting fields that other endpoints support, by the name of the field."""

    prompt_field: ClassVar[str] = "messages"
    """Name of the field that contains the prompt. Error messages about the prompt's length mention it."""

    @classmethod
    def known_fields(cls) -> list[str]:
        """Return the JSON names of all fields."""
        return [info.alias or name for name, info in cls.model_fields.items()]

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets."""
        return [*super().ignored_fields(), *self._ignored]

    @model_validator(mode="wrap")
    @classmethod
    def _set_unknown_fields_aside(
        cls, data: Any, handler: ModelWrapValidatorHandler[RequestFields]
    ) -> RequestFields:
        known = _names(cls)
        if not isinstance(data, dict) or data.keys() <= known:
            return handler(data)
        given = {name: value for name, value in data.items() if name in known or value is not None}
        unknown = [name for name in given if name not in known]
        if not cls.ignores_unknown or len(unknown) > _MAX_UNKNOWN_FIELDS:
            return handler(given)
        ignored = []
        for name in unknown:
            option = FOREIGN_NAMES.get(name, name)
            if option in known and option not in given:
                given[option] = given.pop(name)
            elif not cls._is_refused(name, option):
                ignored.append(name)
                del given[name]
        fields = handler(given)
        fields._ignored = ignored
        return fields

    @classmethod
    def _is_refused(cls, name: str, option: str) -> bool:
        # Ollama's fields include those in `options`, such as `options.num_predict`.
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


# Maximum number of entries in a list or object. Bounds the validation time.
_MAX_ENTRIES = 10_000
# Options for which -1 means the default, as in llama.cpp and LM Studio.
_MINUS_ONE_IS_DEFAULT = ("max_tokens", "seed")


def _reply_field(name: str, option: Option, hint: Any) -> Any:
    """Return the type and default of a request field, derived from the option's declaration.

    The option itself validates the value, because pydantic would collect an error for every item of a list.
    """
    # The Python API also accepts classes as schemas, but JSON cannot contain classes.
    types = tuple(each for each in get_args(hint | None) if each is not type)
    adapter: TypeAdapter[Any] = TypeAdapter(Union[types])  # type: ignore[arg-type]  # noqa: UP007
    schema = adapter.json_schema() | option.kind.json_schema(name)
    minus_one = name in _MINUS_ONE_IS_DEFAULT
    if minus_one:
        schema["anyOf"] = [
            {"type": "integer", "minimum": schema.pop("minimum")},
            {"const": -1},
            {"type": "null"},
        ]

    def check(value: Any) -> Any:
        if value is None or (minus_one and value == -1):
            return None
        if isinstance(value, list | dict) and len(value) > _MAX_ENTRIES:
            raise OptionError(f"{name} has {len(value):,} entries", f"use at most {_MAX_ENTRIES:,}")
        if isinstance(value, dict) and isinstance(option.kind, TokenBiases):
            value = _integer_keys(value)
        return option.check(name, value)

    schema["description"] = option.help
    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)], Field(default=None, alias=name)


def _integer_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """Convert the keys of a JSON object from strings to integers, if all of them are integers."""
    if all(key.isascii() and key.isdigit() and len(key) < 10 for key in value):
        return {int(key): item for key, item in value.items()}
    return dict(value)


def _reply_fields() -> dict[str, Any]:
    hints = get_type_hints(ReplyArguments)
    return {
        _attribute(name): _reply_field(name, option, hints[name]) for name, option in REPLY_OPTIONS.items()
    }


def _attribute(name: str) -> str:
    """Return the attribute name for an option, with `_` appended if pydantic has a method of that name."""
    return f"{name}_" if name in dir(BaseModel) else name


_REPLY_FIELDS = _reply_fields()

if TYPE_CHECKING:

    class ReplyFields(RequestFields):
        """The options of a reply, under edgespec's names."""

else:
    ReplyFields = create_model("ReplyFields", __base__=RequestFields, **_REPLY_FIELDS)
    ReplyFields.ignores_unknown = True


def reply_options(fields: ReplyFields) -> dict[str, Any]:
    """Return the reply options that the request sets."""
    values = {name: getattr(fields, _attribute(name)) for name in REPLY_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def combined_options(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Combine the options set by two groups of fields. Raises ApiError if both set the same option."""
    for name in options.keys() & more.keys():
        raise invalid_request(f"two fields of the request set the {name}; leave out one of them", param=name)
    return {**options, **more}


def ignored_in_messages(messages: Sequence[ItemFields]) -> list[str]:
    """Return the ignored fields of messages. Each name is listed where it comes first."""
    first: dict[str, str] = {}
    for index, message in enumerate(messages[:_MAX_SEARCHED_ITEMS]):
        for name in message.ignored_fields():
            first.setdefault(name[:_MAX_NAME_CHARACTERS], f"messages.{index}.{name[:_MAX_NAME_CHARACTERS]}")
    return list(first.values())[:_MAX_UNKNOWN_FIELDS]


def require_fields(place: str, given: BaseModel, names: Sequence[str]) -> None:
    """Raise ApiError if one of the fields `names` is missing."""
    for name in names:
        if getattr(given, name) is None:
            raise invalid_request(f"{place}.{name} is missing; add this field", param=f"{place}.{name}")
