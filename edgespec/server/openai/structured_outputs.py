"""vLLM's request fields for constraints. Each one is equivalent to one of edgespec's own fields."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edgespec.json_schemas import without_other_properties
from edgespec.server.errors import invalid_request
from edgespec.server.fields import RequestFields

__all__ = ["StructuredOutputFields", "vllm_constraint"]

_Schema = dict[str, Any] | str


class StructuredOutputs(RequestFields):
    """vLLM's field `structured_outputs`, which contains one constraint on the answer."""

    json_: _Schema | None = Field(default=None, alias="json", description="Same as schema.")
    regex: str | None = Field(default=None, description="Same as the request field regex.")
    choice: list[str] | None = Field(default=None, description="Same as the request field choice.")
    grammar: str | None = Field(default=None, description="Same as the request field grammar.")
    json_object: bool | None = Field(default=None, description="true makes the answer a JSON object.")


class StructuredOutputFields(RequestFields):
    """vLLM's request fields for constraints. The names that start with `guided_` are from older versions."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = Field(default=None, description="Same as schema.")
    guided_regex: str | None = Field(default=None, description="Same as regex.")
    guided_choice: list[str] | None = Field(default=None, description="Same as choice.")
    guided_grammar: str | None = Field(default=None, description="Same as grammar.")


def vllm_constraint(fields: StructuredOutputFields) -> dict[str, Any]:
    """Return the reply option that vLLM's fields set, or an empty dictionary if they set none.

    Raises:
        ApiError: The fields set more than one constraint.
    """
    nested = fields.structured_outputs or StructuredOutputs()
    given = [
        ("structured_outputs.json", "schema", nested.json_),
        ("structured_outputs.json_object", "schema", {"type": "object"} if nested.json_object else None),
        ("structured_outputs.regex", "regex", nested.regex),
        ("structured_outputs.choice", "choice", nested.choice),
        ("structured_outputs.grammar", "grammar", nested.grammar),
        ("guided_json", "schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "grammar", fields.guided_grammar),
    ]
    given = [each for each in given if each[2] is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _, _ in given)
        raise invalid_request(f"{names} cannot be used together; choose one of them", param=given[1][0])
    return {
        option: without_other_properties(value) if isinstance(value, dict) else value
        for _, option, value in given
    }
