"""Base classes of the request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    create_model,
)

from edgespec.errors import OptionError
from edgespec.options import REPLY_OPTIONS, Option, ReplyArguments
from edgespec.reply_option_kinds import TokenBiases
from edgespec.server.errors import invalid_request

__all__ = ["Ignored", "ReplyFields", "RequestFields", "combined_options", "reply_options", "require_fields"]

_IGNORED = object()
Ignored = Annotated[Any, Field(default=None, description="Accepted, but ignored."), _IGNORED]
"""The type of a field that can be ignored without changing what the client expects from the reply."""


class RequestFields(BaseModel):
    """A JSON object in a request. Unknown fields are rejected, and numbers are not converted to strings."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
        return [
            name
            for name, info in type(self).model_fields.items()
            if _IGNORED in info.metadata and getattr(self, name) is not None
        ]


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


def reply_options(fields: ReplyFields) -> dict[str, Any]:
    """Return the reply options that the request sets."""
    values = {name: getattr(fields, _attribute(name)) for name in REPLY_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def combined_options(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Combine the options set by two groups of fields. Raises ApiError if both set the same option."""
    for name in options.keys() & more.keys():
        raise invalid_request(f"two fields of the request set the {name}; leave out one of them", param=name)
    return {**options, **more}


def require_fields(place: str, given: RequestFields, names: Sequence[str]) -> None:
    """Raise ApiError if one of the fields `names` is missing."""
    for name in names:
        if getattr(given, name) is None:
            raise invalid_request(f"{place}.{name} is missing; add this field", param=f"{place}.{name}")
