"""Handle `POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import FailFast, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec import Reply, TextChunk
from edgespec.chat.tool_calls.calls import ToolCallDelta
from edgespec.reply import TokenLogprobs
from edgespec.server.errors import invalid_request
from edgespec.server.fields import Ignored, combined_options, ignored_in_messages
from edgespec.server.generation import ReplyRequest
from edgespec.server.openai.errors import error_event
from edgespec.server.openai.fields import ChoiceFields, requests_options
from edgespec.server.openai.logprobs import ChatLogprobs, chat_logprobs
from edgespec.server.openai.messages import ChatMessage, chat_prompt
from edgespec.server.openai.reasoning import ReasoningFields
from edgespec.server.openai.report import ReplyReport, Timings, Usage, report, timings, usage
from edgespec.server.openai.response_format import ResponseFormat, answer_schema
from edgespec.server.protocol import Call
from edgespec.server.responses import json_response, open_stream, server_sent_event

__all__ = ["ChatCompletion", "ChatRequest", "create_chat_completion"]


class ChatRequest(ReasoningFields, ChoiceFields):
    """The body of a chat completion request."""

    advice = MappingProxyType(
        {
            "prompt": "use messages, or POST /v1/completions",
            "functions": "use tools",
            "function_call": "use tool_choice",
            "think": "use thinking",
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model can call.")
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = Field(
        default=None, description="auto, none, required, or the function that the model must call."
    )
    logprobs: bool | None = Field(default=None, description="Return log-probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Number of the most likely tokens to return at each position."
    )
    max_completion_tokens: int | None = Field(default=None, description="Like max_tokens.")
    parallel_tool_calls: Ignored
    prediction: Ignored
    verbosity: Ignored

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets, including those of messages."""
        return [*super().ignored_fields(), *ignored_in_messages(self.messages)]


class ChatReplyMessage(TypedDict):
    """The message of a reply.

    `reasoning_content` is present if the model reasoned, and `tool_calls` if it calls tools.
    """

    role: str
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(TypedDict):
    """One of the replies."""

    index: int
    message: ChatReplyMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    edgespec: ReplyReport


class ChatCompletion(TypedDict):
    """The response to a chat completion request."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


async def create_chat_completion(call: Call[ChatRequest]) -> Response:
    """Reply to the messages of a request."""
    if call.body.stream:
        return await open_stream(_stream(call), error_event)
    async with call.service.generate(call.body.model, _requests(call.body)) as generation:
        replies: dict[int, Reply] = {}
        logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        async for index, event in generation.events():
            if isinstance(event, Reply):
                replies[index] = event
            elif not event.reasoning:
                logprobs[index] += event.logprobs
        ordered = [replies[index] for index in sorted(replies)]
        completion: ChatCompletion = {
            "id": _new_id(),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.body.model or generation.model.name,
            "choices": [
                {
                    "index": index,
                    "message": _message(reply),
                    "finish_reason": _finish_reason(reply),
                    "logprobs": chat_logprobs(logprobs[index]) if call.body.logprobs else None,
                    "edgespec": report(reply, call.body.ignored_fields()),
                }
                for index, reply in enumerate(ordered)
            ],
            "usage": usage(ordered, per_prompt=len(ordered)),
            "timings": timings(ordered),
        }
        return json_response(completion)


def _requests(body: ChatRequest) -> list[ReplyRequest]:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request(
            "top_logprobs requires logprobs: true; set logprobs to true, or leave both out",
            param="top_logprobs",
        )
    schema = answer_schema(body.response_format)
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0 if body.logprobs else None}
    if body.max_completion_tokens not in (None, -1):
        more["max_tokens"] = body.max_completion_tokens
    prompt = chat_prompt(body.messages, body.tools or (), body.tool_choice or "auto")
    return [
        ReplyRequest(prompt, {**body.reasoning_options(), **combined_options(options, schema), **more})
        for options in requests_options(body)
    ]


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def _message(reply: Reply) -> ChatReplyMessage:
    message: ChatReplyMessage = {"role": "assistant", "content": reply.answer}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.answer or None
        message["tool_calls"] = [call.to_json() for call in reply.tool_calls]
    return message


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """Return a part of a tool call. Only the first part of a call has the id and the name."""
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


async def _stream(call: Call[ChatRequest]) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed reply.

    The usage is part of the last choice's last event. If the client requested the usage, it is sent in a
    separate event without choices, which other clients often cannot handle.
    """
    body = call.body
    own_event = bool(body.stream_options and body.stream_options.include_usage)
    async with call.service.generate(body.model, _requests(body)) as generation:
        head = {
            "id": _new_id(),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.model or generation.model.name,
        }
        started: set[int] = set()
        replies: dict[int, Reply] = {}
        async for index, event in generation.events():
            if index not in started:
                started.add(index)
                yield _chunk(head, index, {"role": "assistant", "content": ""})
            if isinstance(event, TextChunk) and event.tool_call:
                yield _chunk(head, index, {"tool_calls": [_call_delta(event.tool_call)]})
                continue
            if not isinstance(event, Reply):
                shown = chat_logprobs(event.logprobs) if body.logprobs and not event.reasoning else None
                if event.text or (shown and shown["content"]):
                    name = "reasoning_content" if event.reasoning else "content"
                    yield _chunk(head, index, {name: event.text}, **({"logprobs": shown} if shown else {}))
                continue
            replies[index] = event
            is_last = len(replies) == (body.n or 1)
            ended = list(replies.values())
            totals = {"usage": usage(ended, len(ended)), "timings": timings(ended)} if is_last else {}
            yield _chunk(
                {**head, **({} if own_event else totals)},
                index,
                {},
                finish_reason=_finish_reason(event),
                edgespec=report(event, body.ignored_fields()),
            )
            if is_last and own_event:
                yield server_sent_event({**head, "choices": [], **totals})
        yield server_sent_event("[DONE]")


def _chunk(head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> bytes:
    return server_sent_event(
        {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **more}]}
    )
