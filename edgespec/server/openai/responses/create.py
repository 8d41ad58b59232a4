"""Handle `POST /v1/responses`.

A request contains the whole conversation, or refers to items of earlier responses.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from edgespec.json_schemas import without_other_properties
from edgespec.server.errors import invalid_request
from edgespec.server.fields import combined_options
from edgespec.server.generation import ReplyRequest
from edgespec.server.openai.fields import openai_options
from edgespec.server.openai.responses.fields import LOGPROBS, ResponsesRequest, TextFormat
from edgespec.server.openai.responses.prompt import chat_prompt
from edgespec.server.openai.responses.response import ResponseBuilder
from edgespec.server.protocol import Call
from edgespec.server.reply_builder import respond
from edgespec.server.stored_items import StoredItems

__all__ = ["create_response"]


async def create_response(call: Call[ResponsesRequest]) -> Response:
    """Reply to the input of a request."""
    body, stored_items = call.body, call.service.stored_items
    builder = ResponseBuilder(body, stored_items if body.store is not False else None)
    return await respond(call, _request(body, stored_items), builder, builder.failed)


def _request(body: ResponsesRequest, stored_items: StoredItems) -> ReplyRequest:
    if body.previous_response_id is not None:
        raise invalid_request(
            "the server stores no responses; leave previous_response_id out, and send the whole"
            " conversation in input",
            param="previous_response_id",
        )
    if body.background:
        raise invalid_request(
            "background is true, but the server replies only while the client waits; leave background out",
            param="background",
        )
    options = combined_options(openai_options(body), _schema(body.text.format if body.text else None))
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        options["logprobs"] = body.top_logprobs or 0
    return ReplyRequest(chat_prompt(body, stored_items), {**body.reasoning_options(), **options})


def _schema(wanted: TextFormat | None) -> dict[str, Any]:
    """Return the reply options for a text format: a JSON schema, or nothing if it allows any text."""
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"schema": {"type": "object"}}
    if wanted.schema_ is None:
        raise invalid_request(
            "text.format has type json_schema, but no schema; add text.format.schema", param="text.format"
        )
    return {"schema": without_other_properties(wanted.schema_)}
