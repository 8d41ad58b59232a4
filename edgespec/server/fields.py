"""Base classes of the request bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from edgespec.options import REPLY_OPTIONS, Option, ReplyArguments

__all__ = ["Ignored", "ReplyFields", "RequestFields", "reply_options"]

_IGNORED = object()
Ignored = Annotated[Any, Field(default=None, description="Accepted, but ignored."), _IGNORED]
"""The type of a field that can be ignored without changing what the client expects from the reply."""


class RequestFields(BaseModel):
    """A JSON object in a request. Unknown fields are rejected, and numbers are not converted to strings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def ignored_fields(self) -> list[str]:
        """Return the names of the fields that have a value and are ignored."""
        return [
            name
            for name, info in type(self).model_fields.items()
            if _IGNORED in info.metadata and getattr(self, name) is not None
        ]


# Options for which -1 means the default, as in llama.cpp and LM Studio.
_MINUS_ONE_IS_DEFAULT = ("max_tokens", "seed")


def _reply_field(name: str, option: Option, hint: Any) -> Any:
    """Return the type of a request field and its description, derived from the option's declaration."""
    limits = option.kind.json_schema(name)
    minus_one = name in _MINUS_ONE_IS_DEFAULT
    if minus_one:
        limits = {"anyOf": [{"type": "integer", **limits}, {"const": -1}, {"type": "null"}]}

    def check(value: Any) -> Any:
        return None if value is None or (minus_one and value == -1) else option.check(name, value)

    field = Field(default=None, description=option.help, json_schema_extra=limits)
    return Annotated[hint | None, AfterValidator(check)], field


def _reply_fields() -> dict[str, Any]:
    hints = get_type_hints(ReplyArguments)
    return {
        name: _reply_field(name, option, hints[name])
        for name, option in REPLY_OPTIONS.items()
        if not option.api_only
    }


_REPLY_FIELDS = _reply_fields()

if TYPE_CHECKING:

    class ReplyFields(RequestFields):
        """The options of a reply, with edgespec's names."""

else:
    ReplyFields = create_model("ReplyFields", __base__=RequestFields, **_REPLY_FIELDS)


def reply_options(fields: ReplyFields) -> dict[str, Any]:
    """Return the options of a reply that the request sets."""
    values = {name: getattr(fields, name) for name in _REPLY_FIELDS}
    return {name: value for name, value in values.items() if value is not None}
