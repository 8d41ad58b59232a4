"""Handle `POST /v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import FailFast, Field, model_validator
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec import Reply
from edgespec.chat.tool_calls.calls import ToolCallDelta
from edgespec.chat.tool_calls.tool_set import ToolChoice
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.endpoint import Call, endpoint
from edgespec.server.fields import Ignored, ItemFields
from edgespec.server.generation import ChatPrompt, GenerationRequest
from edgespec.server.leniency.content import (
    SystemPrompt,
    content_of,
    omitted_parts,
    part_text,
    reasoning_of,
    result_text,
    system_messages,
)
from edgespec.server.leniency.tools import (
    checked_choice,
    modern_message,
    modern_tools,
    needs_whole_calls,
    offered_tools,
    skipped_tools,
)
from edgespec.server.openai.fields import (
    ChoiceFields,
    ReasoningFields,
    ToolFields,
    error_event,
    requests_options,
)
from edgespec.server.openai.logprobs import ChatLogprobs, LogprobFields, chat_logprobs
from edgespec.server.openai.report import (
    ChoiceStream,
    CompletionHead,
    ReplyReport,
    Timings,
    Usage,
    completion_head,
    report,
    timings,
    usage,
)
from edgespec.server.responses import json_response, open_stream

__all__ = ["ChatRequest", "chat_prompt", "create_chat_completion"]

# Content part types for tool calls and tool results in Anthropic's API.
_BLOCKS = ("tool_use", "tool_result")
# The fields to read from content parts in other APIs' formats, keyed by part type.
_READ_FIELDS = {
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content"),
    "thinking": ("thinking",),
    "reasoning": ("reasoning",),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("source",),
    "document": ("source", "title", "context"),
    "search_result": ("source", "title", "content"),
}


class ContentPart(ItemFields):
    """A content part of a message: text or, in user messages, an image."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def _own_ignored_fields(self) -> list[str]:
        read = _READ_FIELDS.get(self.type, ())
        return [name for name in super()._own_ignored_fields() if name not in read]


# Define an alias, because a union cannot contain an annotated type directly.
_ChatParts = TypeAliasType("_ChatParts", Annotated[list[ContentPart], FailFast()])


class ChatMessage(ItemFields):
    """A message in the conversation. Fields that other servers add to replies are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _ChatParts | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: Ignored
    refusal: Ignored
    annotations: Ignored
    audio: Ignored

    @model_validator(mode="before")
    @classmethod
    def _modernise(cls, data: Any) -> Any:
        return modern_message(data) if isinstance(data, dict) else data


class ChatRequest(LogprobFields, ToolFields, ReasoningFields, ChoiceFields):
    """The body of a chat completion request."""

    advice = MappingProxyType(
        {
            "input": "use messages, or POST /v1/responses",
            "prompt": "use messages, or POST /v1/completions",
            "think": "use thinking",
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    system: SystemPrompt = Field(default=None, description="A system prompt before the messages.")
    functions: list[dict[str, Any]] | None = Field(
        default=None, description="Older form of tools. The reply then contains function_call."
    )
    function_call: str | dict[str, Any] | None = Field(
        default=None,
        description="Older form of tool_choice: auto, none, or an object with a name.",
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like max_tokens."
    )
    prediction: Ignored
    verbosity: Ignored

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the locations of skipped tools and parts."""
        tools = skipped_tools(self.tools or ())
        return [*super().ignored_fields(), *tools, *omitted_in_results(self.messages)]


class ChatReplyMessage(TypedDict):
    """The reply message.

    `reasoning_content` is present if the model reasoned, and `tool_calls` if it called tools. If the request
    has `functions`, the first call is in `function_call` instead.
    """

    role: str
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    function_call: NotRequired[dict[str, Any]]


class ChatChoice(TypedDict):
    """One of the replies."""

    index: int
    message: ChatReplyMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    edgespec: ReplyReport


class ChatCompletion(CompletionHead):
    """The response to a chat completion request."""

    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


@endpoint("POST", "/v1/chat/completions", ChatRequest, ChatCompletion, streams=True)
async def create_chat_completion(call: Call[ChatRequest]) -> Response:
    """Reply to a conversation."""
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
        has_logprobs = call.body.wanted_logprobs is not None
        completion: ChatCompletion = {
            **completion_head("chatcmpl", "chat.completion", generation.model_name),
            "choices": [
                {
                    "index": index,
                    "message": _message(reply, call.body),
                    "finish_reason": _finish_reason(reply, call.body),
                    "logprobs": chat_logprobs(logprobs[index]) if has_logprobs else None,
                    "edgespec": report(reply, call.body.ignored_fields()),
                }
                for index, reply in enumerate(ordered)
            ],
            "usage": usage(ordered, len(ordered)),
            "timings": timings(ordered),
        }
        return json_response(completion)


def _requests(body: ChatRequest) -> list[GenerationRequest]:
    more: dict[str, Any] = {"logprobs": body.wanted_logprobs}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
    tools, choice = modern_tools(body.tools or (), body.tool_choice, body.functions or (), body.function_call)
    offered = offered_tools(tools)
    # In the older format, a message can contain only one tool call.
    parallel = False if body.functions else body.parallel_tool_calls
    choice = checked_choice(choice, offered, tools, parallel=parallel)
    prompt = chat_prompt(body.messages, offered.definitions, choice, system=body.system)
    return [
        GenerationRequest(prompt, {**body.reasoning_options(), **options, **more})
        for options in requests_options(body)
    ]


def _message(reply: Reply, body: ChatRequest) -> ChatReplyMessage:
    message: ChatReplyMessage = {"role": "assistant", "content": reply.answer}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.answer or None
        if body.functions:
            message["function_call"] = reply.tool_calls[0].to_json()["function"]
        else:
            message["tool_calls"] = [call.to_json() for call in reply.tool_calls]
    return message


def _finish_reason(reply: Reply, body: ChatRequest) -> str:
    if not (reply.tool_calls and reply.finish_reason == "stop"):
        return reply.finish_reason
    return "function_call" if body.functions else "tool_calls"


def _call_delta(delta: ToolCallDelta, body: ChatRequest) -> dict[str, Any]:
    """Format a part of a tool call. Only the first part of a call includes the id and the name.

    In the older format, a message has only one call, so further calls are omitted.
    """
    function = {"arguments": delta.arguments}
    if delta.id:
        function = {"name": delta.name, **function}
    if body.functions:
        return {"function_call": function} if delta.index == 0 else {}
    identity = {"id": delta.id, "type": "function"} if delta.id else {}
    return {"tool_calls": [{"index": delta.index, **identity, "function": function}]}


async def _stream(call: Call[ChatRequest]) -> AsyncGenerator[bytes, None]:
    body = call.body
    has_logprobs = body.wanted_logprobs is not None
    whole_calls = needs_whole_calls(call.headers)
    async with call.service.generate(body.model, _requests(body)) as generation:
        head = completion_head("chatcmpl", "chat.completion.chunk", generation.model_name)
        stream = ChoiceStream(body, head, generation, body.n or 1)
        started: set[int] = set()
        async for index, event in generation.events():
            if index not in started:
                started.add(index)
                yield stream.event(index, {"delta": {"role": "assistant", "content": ""}})
            if isinstance(event, Reply):
                if whole_calls and event.tool_calls:
                    calls = [{"index": at, **each.to_json()} for at, each in enumerate(event.tool_calls)]
                    yield stream.event(index, {"delta": {"tool_calls": calls}})
                ending: dict[str, Any] = {"delta": {}, "finish_reason": _finish_reason(event, body)}
                for each in stream.finish(index, ending, event):
                    yield each
            elif event.tool_call:
                if not whole_calls and (delta := _call_delta(event.tool_call, body)):
                    yield stream.event(index, {"delta": delta})
            else:
                shown = chat_logprobs(event.logprobs) if has_logprobs and not event.reasoning else None
                if event.text or (shown and shown["content"]):
                    name = "reasoning_content" if event.reasoning else "content"
                    logprobs = {"logprobs": shown} if shown else {}
                    yield stream.event(index, {"delta": {name: event.text}, **logprobs})


def chat_prompt(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: ToolChoice = "auto",
    *,
    system: SystemPrompt = None,
) -> ChatPrompt:
    """Convert the messages of a request to a chat prompt.

    Raises:
        ApiError: A message contains something other than text and images.
    """
    converted = [each for index, message in enumerate(messages) for each in _converted(index, message)]
    return ChatPrompt.from_messages([*system_messages(system), *converted], tools, tool_choice)


def _converted(index: int, message: ChatMessage) -> list[dict[str, Any]]:
    """Convert a message for `Runtime.stream_messages`. Each tool result becomes a separate message."""
    place = f"messages.{index}.content"
    parts = message.content if isinstance(message.content, list) else []
    calls, results = _anthropic_calls(place, parts)
    reasoning = "".join(reasoning_of(part) or "" for part in _reasoning_parts(message))
    converted = {
        "role": "system" if message.role == "developer" else message.role,
        **_content(place, message),
        "reasoning": message.reasoning_content or message.reasoning or reasoning,
        **({"tool_calls": [*(message.tool_calls or ()), *calls]} if message.tool_calls or calls else {}),
        **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
    }
    return results if len(results) == len(parts) > 0 else [*results, converted]


def _anthropic_calls(
    place: str, parts: Sequence[ContentPart]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return tool calls and tool results in Anthropic's format, which Cursor sends to this endpoint."""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        at, fields = f"{place}.{number}", part.model_extra or {}
        if part.type == "tool_use":
            function = {"name": fields.get("name"), "arguments": fields.get("input")}
            calls.append({"id": fields.get("id"), "type": "function", "function": function})
        elif part.type == "tool_result":
            content = result_text(f"{at}.content", fields.get("content"))
            results.append({"role": "tool", "tool_call_id": fields.get("tool_use_id"), "content": content})
    return calls, results


def _content(place: str, message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool" or not isinstance(message.content, list):
        return {"content": result_text(place, message.content)}
    skipped = _reasoning_parts(message)
    parts = [
        (f"{place}.{at}", each)
        for at, each in enumerate(message.content)
        if each.type not in _BLOCKS and each not in skipped
    ]
    if message.role == "user":
        return content_of(parts)
    return {"content": "\n".join(part_text(at, each) for at, each in parts)}


def _reasoning_parts(message: ChatMessage) -> list[ContentPart]:
    if message.role != "assistant" or not isinstance(message.content, list):
        return []
    return [part for part in message.content if reasoning_of(part) is not None]


def omitted_in_results(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the locations of non-text parts in tool results, including those in Anthropic's format."""
    return [
        place
        for index, message in enumerate(messages)
        for at, content in _results(f"messages.{index}.content", message)
        for place in omitted_parts(at, content)
    ]


def _results(place: str, message: ChatMessage) -> Iterator[tuple[str, Any]]:
    if message.role == "tool":
        yield place, message.content
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type == "tool_result":
            yield f"{place}.{number}.content", (part.model_extra or {}).get("content")
