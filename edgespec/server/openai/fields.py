"""Fields that OpenAI's endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from edgespec.server.errors import invalid_request
from edgespec.server.fields import (
    Ignored,
    Off,
    ReplyFields,
    RequestFields,
    combined_options,
    reply_options,
)
from edgespec.server.openai.structured_outputs import StructuredOutputFields, vllm_constraint

__all__ = [
    "MAX_CHOICES",
    "ChoiceFields",
    "OpenAIFields",
    "StreamOptions",
    "Texts",
    "openai_options",
    "requests_options",
    "texts_in",
]

# Maximum number of replies to one request. They wait in the queue like separate requests.
MAX_CHOICES = 16

# Defined as aliases, because a union cannot contain an annotated type directly.
_Tokens = TypeAliasType("_Tokens", Annotated[list[int], FailFast()])
_Texts = TypeAliasType("_Texts", Annotated[list[str], FailFast()])
_TokenLists = TypeAliasType("_TokenLists", Annotated[list[_Tokens], FailFast()])

Texts: TypeAlias = str | _Texts | _Tokens | _TokenLists
"""A text, or several texts. Each can also be a list of token ids."""


def texts_in(given: Texts) -> list[str | list[int]]:
    """Return the texts of a request."""
    items: Any = given
    return [items] if isinstance(items, str) or isinstance(next(iter(items), None), int) else items


class StreamOptions(RequestFields):
    """Options of an event stream."""

    include_usage: bool | None = Field(
        default=None, description="Send the usage in a separate event, as OpenAI does."
    )
    include_obfuscation: Ignored


class OpenAIFields(ReplyFields, StructuredOutputFields):
    """Fields of all requests that generate text."""

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    stream: bool | None = Field(default=None, description="Send the reply as it is generated.")
    stream_options: StreamOptions | None = None
    metadata: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored
    safety_identifier: Ignored
    service_tier: Ignored
    store: Ignored
    user: Ignored


class ChoiceFields(OpenAIFields):
    """Fields of the requests that can generate several replies."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        default=None, description="Number of replies."
    )
    cache_prompt: Ignored
    ignore_eos: Off
    id_slot: Ignored
    min_tokens: Off
    timings_per_token: Ignored


def openai_options(fields: OpenAIFields) -> dict[str, Any]:
    """Return the reply options of a request, including the constraint in vLLM's fields."""
    return combined_options(reply_options(fields), vllm_constraint(fields))


def requests_options(fields: ChoiceFields) -> list[dict[str, Any]]:
    """Return the options of each of the `n` replies. The seed, if set, increases by one for each reply."""
    if fields.stream_options and not fields.stream:
        raise invalid_request(
            "stream_options requires stream: true; set stream to true, or leave stream_options out",
            param="stream_options",
        )
    options = openai_options(fields)
    seed = options.get("seed")
    return [options if seed is None else {**options, "seed": seed + index} for index in range(fields.n or 1)]
