"""The field `response_format` of chat completions, which makes the answer JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgespec.json_schemas import without_other_properties
from edgespec.server.errors import invalid_request
from edgespec.server.fields import Ignored, RequestFields

__all__ = ["ResponseFormat", "answer_schema"]


class NamedSchema(RequestFields):
    """A JSON schema and its name. The answer always satisfies the schema, with and without `strict`."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: Ignored
    description: Ignored
    strict: Ignored


class ResponseFormat(RequestFields):
    """The format of the answer: any text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


def answer_schema(wanted: ResponseFormat | None) -> dict[str, Any]:
    """Return the reply options for a response format: a JSON schema, or nothing if it allows any text."""
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"schema": without_other_properties(wanted.schema_ or {"type": "object"})}
    if wanted.json_schema is None:
        raise invalid_request(
            "response_format has type json_schema, but no json_schema; add response_format.json_schema",
            param="response_format",
        )
    return {"schema": without_other_properties(wanted.json_schema.schema_)}
