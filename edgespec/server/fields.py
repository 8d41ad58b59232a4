"""Base classes of the request bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from edgespec.options import REPLY_OPTIONS, ReplyArguments

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


def _reply_fields() -> dict[str, Any]:
    hints = get_type_hints(ReplyArguments)
    return {
        name: (hints[name] | None, Field(default=None, description=option.help))
        for name, option in REPLY_OPTIONS.items()
        if not option.api_only
    }


if TYPE_CHECKING:

    class ReplyFields(RequestFields):
        """The options of a reply, with edgespec's names."""

else:
    ReplyFields = create_model("ReplyFields", __base__=RequestFields, **_reply_fields())


def reply_options(fields: ReplyFields) -> dict[str, Any]:
    """Return the options of a reply that the request sets.

    For `seed` and `max_tokens`, -1 means the default, as in llama.cpp.
    """
    given = {name: getattr(fields, name) for name in _OPTION_NAMES}
    return {
        name: value
        for name, value in given.items()
        if value is not None and not (name in ("seed", "max_tokens") and value == -1)
    }


_OPTION_NAMES = tuple(_reply_fields())
