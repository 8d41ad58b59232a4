"""Anthropic's Messages API."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec import Reply, Stats, TextChunk
from edgespec.chat.tool_calls.calls import parse_object
from edgespec.server.endpoint import Call, Protocol, endpoint
from edgespec.server.errors import ApiError, unsupported_content
from edgespec.server.fields import (
    Ignored,
    ItemFields,
    ReplyFields,
    RequestFields,
    reply_options,
    require_fields,
)
from edgespec.server.generation import ChatPrompt, GenerationRequest
from edgespec.server.leniency.constraints import ConstraintFields, answer_constraint, constraints_in
from edgespec.server.leniency.content import (
    content_of,
    is_text,
    omitted_parts,
    part_text,
    plain_message,
    result_text,
    text_of,
)
from edgespec.server.leniency.tools import checked_choice, offered_tools, skipped_tools
from edgespec.server.openai.report import ReplyReport, Timings
from edgespec.server.reply_builder import Event, respond
from edgespec.server.responses import json_response, server_sent_event

__all__ = ["ANTHROPIC", "AnthropicMessageRequest"]

# Placeholder signature for reasoning. Clients drop unsigned reasoning from their next request.
_SIGNATURE = "edgespec"
# Claude Code starts its system prompt with this line, which changes with every request. It is removed,
# because the prefix cache could not reuse anything after it.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# Required fields, keyed by block type.
_NEEDED = {
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ContentBlock(ItemFields):
    """A content block in a message. Its `type` determines which fields are required."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    content: str | _Blocks | dict[str, Any] | None = None


# Define an alias, because a union cannot contain an annotated type directly.
_Blocks = TypeAliasType("_Blocks", Annotated[list[ContentBlock], FailFast()])


class AnthropicMessage(ItemFields):
    """A message in the conversation. Fields that only other servers use are ignored."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Blocks
    tool_calls: list[dict[str, Any]] | None = Field(
        default=None, description="Tool calls in the format of OpenAI's API."
    )

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        return plain_message(data) if isinstance(data, dict) else data


def _is_skipped(message: AnthropicMessage, block: ContentBlock) -> bool:
    """Return whether a block is omitted from the prompt.

    Replies from Anthropic's own models can contain blocks for tools that ran on Anthropic's servers. An
    agent cannot remove these blocks from its conversation, so don't reject them.
    """
    known = ("thinking", "redacted_thinking", "tool_use", "tool_result")
    return message.role == "assistant" and not is_text(block) and block.type not in known


class ThinkingConfig(RequestFields):
    """The `thinking` field, which turns reasoning on or off."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored
    display: Ignored

    @property
    def option(self) -> str:
        """The `thinking` reply option: `on`, `off` or `auto`."""
        return {"enabled": "on", "disabled": "off"}.get(self.type, "auto")


class Thread(RequestFields):
    """The `thread` field, which asks Anthropic's servers to store the conversation to keep requests short."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class AnthropicCountRequest(ConstraintFields):
    """The body of a token count request."""

    advice = MappingProxyType(
        {
            "container": "the server does not run code; leave it out",
            "mcp_servers": "the server does not call tools; call the tools of MCP servers in your program",
        }
    )

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), FailFast()]
    system: str | _Blocks | None = Field(default=None, description="The system prompt.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Tools that the model can call.")
    tool_choice: str | dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    reasoning_effort: str | None = Field(
        default=None,
        description="none turns reasoning off, unless thinking is set. Other values are ignored.",
    )
    cache_control: Ignored
    context_management: Ignored
    speed: Ignored
    user_profile_id: Ignored
    workspace_id: Ignored

    @property
    def thinking_option(self) -> str | None:
        """The `thinking` reply option, or None if the request does not set it."""
        if self.thinking:
            return self.thinking.option
        return "off" if self.reasoning_effort == "none" else None

    @property
    def client_tools(self) -> list[dict[str, Any]]:
        """The tools, with the type `custom` removed, because it has a different meaning in OpenAI's API."""
        return [{**tool, "type": None} if tool.get("type") == "custom" else tool for tool in self.tools or ()]

    def ignored_fields(self) -> list[str]:
        """Return the names of ignored fields and the locations of skipped tools and content."""
        skipped = [*skipped_tools(self.client_tools), *_omitted(self.messages)]
        if self.reasoning_effort and (self.thinking or self.reasoning_effort != "none"):
            skipped.append("reasoning_effort")
        return [*super().ignored_fields(), *skipped]


class AnthropicMessageRequest(AnthropicCountRequest, ReplyFields):
    """The body of a message request."""

    stream: bool | None = Field(default=None, description="Send the reply as it is generated.")
    stop_sequences: list[str] | None = Field(default=None, description="Like stop.")
    thread: Thread | None = Field(
        default=None, description="create is ignored, because the server does not store conversations."
    )
    diagnostics: Ignored
    inference_geo: Ignored
    metadata: Ignored
    service_tier: Ignored

    def ignored_fields(self) -> list[str]:
        """Return the names of ignored fields and the locations of skipped tools and content."""
        return [*super().ignored_fields(), *(["thread"] if self.thread else [])]


def _omitted(messages: list[AnthropicMessage]) -> list[str]:
    places = []
    for index, message in enumerate(messages):
        for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages.{index}.content.{number}"
            if _is_skipped(message, block):
                places.append(place)
            elif block.type == "tool_result":
                places += omitted_parts(f"{place}.content", block.content)
    return places


class AnthropicUsage(TypedDict):
    """Token counts. `input_tokens` excludes tokens found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicReply(TypedDict):
    """The response to a message request."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    timings: Timings
    edgespec: ReplyReport


class MessageBuilder:
    """Builds the message for one reply. See `ReplyBuilder`."""

    def __init__(self) -> None:
        self.response: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks: list[dict[str, Any]] = self.response["content"]
        # The arguments of the tool call being streamed, as JSON text.
        self._arguments = ""
        self._is_open = False

    def start(self, model: str, stats: Stats) -> Iterator[Event]:
        """Begin the message, and yield its first event."""
        self.response.update(model=model, usage=_usage(stats))
        yield {"type": "message_start", "message": self.response}

    def add(self, chunk: TextChunk) -> Iterator[Event]:
        """Add a chunk to the message, and yield the events for it."""
        if call := chunk.tool_call:
            if call.id:
                yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._arguments += call.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        elif chunk.text:
            kind = "thinking" if chunk.reasoning else "text"
            if not self._is_open or self._blocks[-1]["type"] != kind:
                signature = {"signature": ""} if chunk.reasoning else {}
                yield from self._open({"type": kind, kind: "", **signature})
            self._blocks[-1][kind] += chunk.text
            yield self._delta({"type": f"{kind}_delta", kind: chunk.text})

    def finish(self, reply: Reply, more: Mapping[str, Any]) -> Iterator[Event]:
        """End the message, and yield its last events."""
        yield from self._close()
        # If the reply ended in the middle of a tool call, omit the call, because its arguments are
        # incomplete.
        content = [block for block in self._blocks if block.get("input", {}) is not None]
        calls = any(block["type"] == "tool_use" for block in content)
        ending = {
            "stop_reason": _stop_reason(reply, calls),
            "stop_sequence": reply.stop_string or None,
        }
        usage = _usage(reply.stats)
        self.response.update(ending, content=content, usage=usage, **more)
        yield {"type": "message_delta", "delta": ending, "usage": usage, **more}
        yield {"type": "message_stop"}

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block, index = self._blocks[-1], len(self._blocks) - 1
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        yield {"type": "content_block_stop", "index": index}
        self._is_open = False
        if block["type"] == "tool_use":
            block["input"], self._arguments = parse_object(self._arguments), ""


def _stop_reason(reply: Reply, calls: bool) -> str:
    if reply.finish_reason == "length":
        return "model_context_window_exceeded" if reply.context_full else "max_tokens"
    if reply.stop_string:
        return "stop_sequence"
    return "tool_use" if calls else "end_turn"


def _usage(stats: Stats) -> AnthropicUsage:
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_prompt_tokens,
        "output_tokens": stats.generated_tokens,
    }


class AnthropicCount(TypedDict):
    """The number of tokens in a prompt."""

    input_tokens: int


@endpoint("POST", "/v1/messages", AnthropicMessageRequest, AnthropicReply, streams=True)
async def create_message(call: Call[AnthropicMessageRequest]) -> Response:
    """Reply to a conversation."""
    return await respond(call, _request(call.body), MessageBuilder(), _error_event)


@endpoint("POST", "/v1/messages/count_tokens", AnthropicCountRequest, AnthropicCount)
async def count_tokens(call: Call[AnthropicCountRequest]) -> Response:
    """Count the tokens of a prompt."""
    body = call.body
    tokens = await call.service.count_tokens(body.model, _chat_prompt(body), body.thinking_option)
    count: AnthropicCount = {"input_tokens": tokens}
    return json_response(count)


def _request(body: AnthropicMessageRequest) -> GenerationRequest:
    if body.thread and body.thread.type == "continue":
        # Anthropic's client responds to this error by resending the whole conversation.
        raise ApiError(
            404,
            "the server does not store conversations; omit thread, and send the whole conversation in"
            " messages",
            code="thread_not_found",
            param="thread",
            details={"details": {"error_code": "thread_not_found"}},
        )
    options = reply_options(body)
    if body.thinking_option:
        options["thinking"] = body.thinking_option
    if body.stop_sequences:
        options["stop"] = body.stop_sequences
    options |= answer_constraint(constraints_in(body, options))
    return GenerationRequest(_chat_prompt(body), options)


def _chat_prompt(fields: AnthropicCountRequest) -> ChatPrompt:
    """Convert a request's conversation and tools to a chat prompt.

    Raises:
        ApiError: A message contains something other than text and images, or a block is incomplete.
    """
    system = _BILLING_HEADER.sub("", text_of("system", fields.system))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(fields.messages):
        messages += _converted(f"messages.{index}.content", message)
    offered = offered_tools(fields.client_tools)
    choice = checked_choice(fields.tool_choice, offered, fields.client_tools)
    return ChatPrompt.from_messages(messages, offered.definitions, choice)


def _converted(place: str, message: AnthropicMessage) -> list[dict[str, Any]]:
    """Convert a message for `Runtime.stream_messages`. Each tool result becomes a separate message."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        calls = list(message.tool_calls or ())
        return [{"role": role, "content": message.content, "tool_calls": calls}]
    parts: list[tuple[str, ContentBlock]] = []
    reasoning, calls, results = "", list(message.tool_calls or ()), []
    for number, block in enumerate(message.content):
        at = f"{place}.{number}"
        if _is_skipped(message, block):
            continue
        if is_text(block) or (block.type == "image" and message.role == "user"):
            parts.append((at, block))
            continue
        _check(at, block)
        match block.type:
            case "thinking":
                reasoning += block.thinking or ""
            case "tool_use":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                content = result_text(f"{at}.content", block.content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if results and not (parts or reasoning or calls):
        return results
    # Join a reply's text blocks without a separator, because they form a single text interrupted by tool
    # calls. In other messages, each block is a separate text.
    is_reply = message.role == "assistant"
    whole: dict[str, Any] = (
        {"content": "".join(part_text(*part) for part in parts)} if is_reply else content_of(parts)
    )
    converted = {"role": role, **whole, "reasoning": reasoning, "tool_calls": calls}
    return [*results, converted]


def _check(place: str, block: ContentBlock) -> None:
    if block.type not in _NEEDED:
        raise unsupported_content(block.type, param=place)
    require_fields(place, block, _NEEDED[block.type])


def _error_body(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.code == "context_length_exceeded":
        # Agents such as Claude Code recognise this wording, and use the numbers to shorten the conversation.
        tokens, context_tokens = error.details.get("n_prompt_tokens", 0), error.details.get("n_ctx", 0)
        sizes = f"{tokens} tokens > {context_tokens} maximum; " if tokens > context_tokens else ""
        message = f"prompt is too long: {sizes}{message}"
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, **error.details}}


def _error_event(error: ApiError) -> bytes:
    return server_sent_event(_error_body(error), "error")


ANTHROPIC = Protocol("Anthropic", ("/v1/messages",), (create_message, count_tokens), _error_body)
