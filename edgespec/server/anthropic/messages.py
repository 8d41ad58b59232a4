"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec import Reply
from edgespec.server.anthropic.errors import error_event
from edgespec.server.anthropic.fields import AnthropicCountRequest, AnthropicMessageRequest
from edgespec.server.anthropic.message import Event, MessageBuilder
from edgespec.server.anthropic.prompt import chat_prompt
from edgespec.server.fields import reply_options
from edgespec.server.generation import Generation, ReplyRequest
from edgespec.server.openai.report import report, timings
from edgespec.server.protocol import Call
from edgespec.server.responses import json_response, open_stream, server_sent_event

__all__ = ["AnthropicCount", "count_tokens", "create_message"]


class AnthropicCount(TypedDict):
    """The number of tokens in a prompt."""

    input_tokens: int


async def create_message(call: Call[AnthropicMessageRequest]) -> Response:
    """Reply to the messages of a request."""
    if call.body.stream:
        return await open_stream(_stream(call), error_event)
    async with call.service.generate(call.body.model, [_request(call.body)]) as generation:
        builder = MessageBuilder(call.body.model or generation.model.name)
        async for _ in _events(call.body, generation, builder):
            pass
        return json_response(builder.message)


async def count_tokens(call: Call[AnthropicCountRequest]) -> Response:
    """Count the tokens of the prompt that a request for a message would have.

    The start of a reply counts as a message, which adds a few tokens.
    """
    prompt, default = chat_prompt(call.body), call.service.settings.reply_options.get("thinking", "auto")
    begun = [{"role": "assistant", "content": prompt.reply_start}] if prompt.reply_start else []
    async with call.service.models.borrow(call.body.model) as model:
        tokens = await asyncio.to_thread(
            model.runtime.count_tokens,
            [*prompt.messages, *begun],
            tools=prompt.tools,
            tool_choice=prompt.tool_choice,
            thinking=call.body.thinking.option if call.body.thinking else default,
        )
    count: AnthropicCount = {"input_tokens": tokens}
    return json_response(count)


def _request(body: AnthropicMessageRequest) -> ReplyRequest:
    options = reply_options(body)
    if body.thinking:
        options["thinking"] = body.thinking.option
    if body.stop_sequences:
        options["stop"] = body.stop_sequences
    if body.output_config and body.output_config.format:
        options["schema"] = body.output_config.format.schema_
    return ReplyRequest(chat_prompt(body), options)


async def _stream(call: Call[AnthropicMessageRequest]) -> AsyncGenerator[bytes, None]:
    async with call.service.generate(call.body.model, [_request(call.body)]) as generation:
        builder = MessageBuilder(call.body.model or generation.model.name)
        async for event in _events(call.body, generation, builder):
            yield server_sent_event(event, event["type"])


async def _events(
    body: AnthropicMessageRequest, generation: Generation, builder: MessageBuilder
) -> AsyncIterator[Event]:
    """Yield the events of a reply while building its message."""
    started = False
    async for index, event in generation.events():
        if not started:
            started = True
            yield builder.start(generation.stats(index))
        if isinstance(event, Reply):
            more: dict[str, Any] = {
                "timings": timings([event]),
                "edgespec": report(event, generation.model, body.ignored_fields()),
            }
            max_tokens = reply_options(body).get("max_tokens")
            for each in builder.finish(event, max_tokens, more):
                yield each
        else:
            for each in builder.add(event):
                yield each
