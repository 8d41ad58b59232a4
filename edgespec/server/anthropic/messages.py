"""Handle `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec.json_schemas import without_other_properties
from edgespec.server.anthropic.errors import error_event
from edgespec.server.anthropic.fields import AnthropicCountRequest, AnthropicMessageRequest
from edgespec.server.anthropic.message import MessageBuilder
from edgespec.server.anthropic.prompt import chat_prompt
from edgespec.server.errors import ApiError
from edgespec.server.fields import combined_options, reply_options
from edgespec.server.generation import ReplyRequest
from edgespec.server.protocol import Call
from edgespec.server.reply_builder import respond
from edgespec.server.responses import json_response

__all__ = ["AnthropicCount", "count_tokens", "create_message"]


class AnthropicCount(TypedDict):
    """The number of tokens in a prompt."""

    input_tokens: int


async def create_message(call: Call[AnthropicMessageRequest]) -> Response:
    """Reply to the messages of a request."""
    return await respond(call, _request(call.body), MessageBuilder(), error_event)


async def count_tokens(call: Call[AnthropicCountRequest]) -> Response:
    """Count the tokens in the prompt of a message request."""
    thinking = call.body.thinking.option if call.body.thinking else None
    tokens = await call.service.count_tokens(call.body.model, chat_prompt(call.body), thinking)
    count: AnthropicCount = {"input_tokens": tokens}
    return json_response(count)


def _request(body: AnthropicMessageRequest) -> ReplyRequest:
    if body.thread and body.thread.type == "continue":
        # After this error, Anthropic's client sends the whole conversation.
        raise ApiError(
            404,
            "the server stores no conversations; omit thread, and send the whole conversation in messages",
            param="thread",
            details={"details": {"error_code": "thread_not_found"}},
        )
    options = reply_options(body)
    if body.thinking:
        options["thinking"] = body.thinking.option
    if body.stop_sequences:
        options["stop"] = body.stop_sequences
    if body.answer_format:
        schema = without_other_properties(body.answer_format.schema_)
        options = combined_options(options, {"schema": schema})
    return ReplyRequest(chat_prompt(body), options)
