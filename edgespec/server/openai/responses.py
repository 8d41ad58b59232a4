"""Handle `POST /v1/responses`, OpenAI's Responses API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec import Reply, Stats, TextChunk
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.endpoint import Call, endpoint
from edgespec.server.errors import ApiError, invalid_request
from edgespec.server.fields import Ignored, ItemFields, require_fields
from edgespec.server.generation import ChatPrompt, GenerationRequest
from edgespec.server.leniency.content import (
    content_of,
    omitted_parts,
    part_text,
    plain_message,
    result_text,
    text_of,
)
from edgespec.server.leniency.tools import OfferedTools, checked_choice, offered_tools, skipped_tools
from edgespec.server.openai.fields import OpenAIFields, ReasoningFields, ToolFields, openai_options
from edgespec.server.openai.logprobs import chat_logprobs
from edgespec.server.openai.report import ReplyReport, Timings
from edgespec.server.reply_builder import Event, respond
from edgespec.server.responses import server_sent_event
from edgespec.server.service import StoredItems

__all__ = ["ResponsesRequest", "chat_prompt", "create_response"]

# Prefixes of ids, as in OpenAI's API.
_PREFIXES = {"response": "resp", "message": "msg", "reasoning": "rs", "function_call": "fc"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that may contain a call's input, in order of preference. Text in any field other than `arguments` is
# passed as the argument `input`.
_CALL_INPUTS = ("arguments", "action", "operation", "input")
# Types of content parts that programs send as separate items, outside of a message.
_PARTS = ("text", "input_text", "output_text", "input_image", "input_file", "input_audio", "image_url")
# The value of `include` that requests log-probabilities.
LOGPROBS = "message.output_text.logprobs"


class InputPart(ItemFields):
    """A content part of a message: text or, in user messages, an image."""

    unlisted = frozenset({"annotations", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None


# Define an alias, because a union cannot contain an annotated type directly.
_ResponseParts = TypeAliasType("_ResponseParts", Annotated[list[InputPart], FailFast()])


class InputItem(ItemFields):
    """An item in the conversation. Its `type` determines which fields are required.

    Agents add items of many types, depending on the provider's tools. Items shaped like a tool call or a tool
    result are treated as such. Others, such as web searches, are skipped and reported, because the agent
    cannot remove them from its conversation.
    """

    unlisted = frozenset({"status", "encrypted_content"})

    type: str | None = Field(default=None, description="Defaults to message.")
    id: str | None = None
    role: str | None = None
    content: str | _ResponseParts | None = None
    text: str | None = None
    summary: _ResponseParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    action: Any = None
    operation: Any = None
    input: Any = None
    output: Any = None
    error: Any = None
    tools: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        return plain_message(data) if isinstance(data, dict) and "role" in data else data

    @property
    def form(self) -> Literal["message", "part", "reasoning", "call", "result", "skipped"]:
        """How the item is treated when building the prompt."""
        kind = self.type or "message"
        if kind in _PARTS:
            return "part"
        if kind in ("message", "reasoning"):
            return "reasoning" if kind == "reasoning" else "message"
        if kind in ("function_call", "function_call_output"):
            return "call" if kind == "function_call" else "result"
        if kind.endswith("_call") and (self.call_id or self.has_own_result):
            return "call"
        return "result" if kind.endswith("_output") and self.call_id else "skipped"

    @property
    def has_own_result(self) -> bool:
        """Whether the item contains both a call and its result."""
        return self.type == "mcp_call" and bool(self.id)


_Items = TypeAliasType("_Items", Annotated[list[InputItem], Field(min_length=1), FailFast()])


class ResponsesRequest(ToolFields, ReasoningFields, OpenAIFields):
    """The body of a request to create a response."""

    prompt_field = "input"
    advice = MappingProxyType(
        {
            "conversation": "the server does not store conversations; send the whole conversation in input",
            "messages": "use input, or POST /v1/chat/completions",
            "n": "a response contains only one reply; send the request several times",
            "prompt": "the server does not store prompts; use instructions and input",
        }
    )

    other_names = MappingProxyType({"system": "instructions", "system_prompt": "instructions"})

    input: str | _Items = Field(description="The user's message, or the whole conversation.")
    instructions: str | None = Field(default=None, description="The system prompt.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like max_tokens."
    )
    include: list[str] | None = Field(default=None, description=f"{LOGPROBS} asks for log-probabilities.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Number of the most likely tokens to return at each position."
    )
    previous_response_id: str | None = Field(
        default=None, description="Not supported, because the server does not store responses."
    )
    background: bool | None = Field(default=None, description="true is not supported.")
    store: bool | None = Field(
        default=None,
        description="false means that later requests will not refer to the response's items by ID.",
    )
    client_metadata: Ignored
    max_tool_calls: Ignored
    prompt_cache_options: Ignored
    truncation: Ignored

    @property
    def added_tools(self) -> list[Any]:
        """Tools added by items in the conversation, such as the results of a tool search."""
        items = [] if isinstance(self.input, str) else self.input
        return [tool for item in items for tool in item.tools or ()]

    def ignored_fields(self) -> list[str]:
        """Return the names of ignored fields and the locations of skipped tools, items and parts."""
        tools = skipped_tools(self.tools or ())
        items = [] if isinstance(self.input, str) else self.input
        skipped = [
            f"input.{at}"
            for at, item in enumerate(items)
            if item.form == "skipped" and item.type not in ("item_reference", "additional_tools")
        ]
        omitted = [
            place
            for at, item in enumerate(items)
            if item.form in ("call", "result")
            for place in omitted_parts(f"input.{at}.output", item.output)
        ]
        include = [f"include.{at}" for at, name in enumerate(self.include or ()) if name != LOGPROBS]
        return [*super().ignored_fields(), *tools, *skipped, *omitted, *include]


class InputDetails(TypedDict):
    """Details about the prompt."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Details about the generated tokens."""

    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """The response. `output` contains items of the types `reasoning`, `message` and `function_call`."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponsesUsage | None
    timings: Timings
    edgespec: ReplyReport


class ResponseBuilder:
    """Builds the response for one reply. See `ReplyBuilder`.

    Args:
        body: The request.
        offered: The tools that the model can call.
        stored_items: Where to store the response's items. If None, nothing is stored.
    """

    def __init__(
        self, body: ResponsesRequest, offered: OfferedTools, stored_items: StoredItems | None
    ) -> None:
        self._stored_items, self._namespaces = stored_items, offered.namespaces
        self.response: dict[str, Any] = {
            "id": _new_id("response"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": "",
            "instructions": body.instructions,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        self._items: list[dict[str, Any]] = self.response["output"]
        self._event_count = 0
        # The type of the item being streamed, or None.
        self._open_kind: str | None = None
        self._reasoning_tokens = 0
        # Log-probabilities of tokens that arrived before any text of the message. They belong to the message
        # if its first character spans several tokens. If reasoning or a tool call follows, they belonged to a
        # marker, and are dropped.
        self._waiting_logprobs: list[TokenLogprobs] = []

    def start(self, model: str, stats: Stats) -> Iterator[Event]:  # noqa: ARG002
        """Begin the response, and yield its first events."""
        self.response["model"] = model
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, chunk: TextChunk) -> Iterator[Event]:
        """Add a chunk to the response, and yield the events for it."""
        if chunk.reasoning:
            self._reasoning_tokens += chunk.token_count
        kind = "reasoning" if chunk.reasoning else "message"
        if call := chunk.tool_call:
            if call.id:
                yield from self._open("function_call", call_id=call.id, **self._name(call.name), arguments="")
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._item_event("function_call_arguments.delta", delta=call.arguments)
        elif chunk.text or (chunk.logprobs and self._open_kind == kind):
            if self._open_kind != kind:
                yield from self._open_text(kind)
            yield self._add_text(chunk)
        elif not chunk.reasoning:
            self._waiting_logprobs += chunk.logprobs

    def finish(self, reply: Reply, more: Mapping[str, Any]) -> Iterator[Event]:
        """End the response, and yield its last events."""
        is_cut = reply.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        stats = reply.stats
        usage: ResponsesUsage = {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": stats.cached_prompt_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": stats.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        }
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.response.update(status=status, incomplete_details=details, usage=usage, **more)
        if self._stored_items:
            for item in self._items:
                self._stored_items.add(item)
        yield self._event(f"response.{status}", response=self.response)

    def failed(self, error: ApiError) -> bytes:
        """Return the server-sent event that reports an error and ends the stream."""
        details = {"code": error.code, "message": error.message}
        self.response.update(status="failed", error=details)
        return server_sent_event(self._event("response.failed", response=self.response), "response.failed")

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        if kind != "message":
            self._waiting_logprobs.clear()
        item = {"id": _new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open_kind = kind
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _name(self, offered: str) -> dict[str, str]:
        namespace, name = self._namespaces.get(offered, ("", offered))
        return {"name": name, "namespace": namespace} if namespace else {"name": name}

    def _open_text(self, kind: str) -> Iterator[Event]:
        fields: dict[str, Any]
        part: dict[str, Any]
        if kind == "reasoning":
            fields, part = {"summary": []}, {"type": "reasoning_text", "text": ""}
        else:
            fields = {"role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._open(kind, **fields, content=[])
        self._items[-1]["content"].append(part)
        yield self._item_event("content_part.added", content_index=0, part=part)

    def _add_text(self, chunk: TextChunk) -> Event:
        (part,) = self._items[-1]["content"]
        part["text"] += chunk.text
        if chunk.reasoning:
            return self._item_event("reasoning_text.delta", content_index=0, delta=chunk.text)
        logprobs = chat_logprobs([*self._waiting_logprobs, *chunk.logprobs])["content"]
        self._waiting_logprobs.clear()
        part["logprobs"] += logprobs
        return self._item_event("output_text.delta", content_index=0, delta=chunk.text, logprobs=logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open_kind is None:
            return
        item = self._items[-1]
        if self._open_kind == "function_call":
            yield self._item_event("function_call_arguments.done", arguments=item["arguments"])
        else:
            (part,) = item["content"]
            shown = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._item_event(f"{part['type']}.done", content_index=0, **shown)
            yield self._item_event("content_part.done", content_index=0, part=part)
        self._open_kind = None
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_event(self, name: str, **fields: Any) -> Event:
        index = len(self._items) - 1
        return self._event(f"response.{name}", item_id=self._items[index]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return event


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"


@endpoint("POST", "/v1/responses", ResponsesRequest, ResponseObject, streams=True)
async def create_response(call: Call[ResponsesRequest]) -> Response:
    """Reply to a message or a conversation."""
    body, stored_items = call.body, call.service.stored_items
    offered = offered_tools(body.tools or (), body.added_tools)
    builder = ResponseBuilder(body, offered, stored_items if body.store is not False else None)
    return await respond(call, _request(body, offered, stored_items), builder, builder.failed)


def _request(body: ResponsesRequest, offered: OfferedTools, stored_items: StoredItems) -> GenerationRequest:
    if body.previous_response_id:
        raise invalid_request(
            "the server does not store responses; leave previous_response_id out, and send the whole"
            " conversation in input",
            param="previous_response_id",
        )
    if body.background:
        raise invalid_request(
            "background is true, but the server replies only while the client waits; leave background out",
            param="background",
        )
    options = openai_options(body)
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        options["logprobs"] = body.top_logprobs or 0
    return GenerationRequest(
        chat_prompt(body, offered, stored_items), {**body.reasoning_options(), **options}
    )


def chat_prompt(body: ResponsesRequest, offered: OfferedTools, stored_items: StoredItems) -> ChatPrompt:
    """Convert a request's conversation to a chat prompt.

    Args:
        body: The request.
        offered: The tools that the model can call.
        stored_items: Items of recent responses that the conversation can refer to.

    Raises:
        ApiError: An item contains something other than text and images, is incomplete, or refers to an item
            that is not stored.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            place = f"input.{index}"
            known = _stored(place, item, stored_items) if item.type == "item_reference" else item
            if known.form == "part":
                _add_part(messages, place, known, goes_on=index > 0 and body.input[index - 1].form == "part")
            else:
                _add(messages, place, known, offered)
    choice = checked_choice(body.tool_choice, offered, body.tools or (), parallel=body.parallel_tool_calls)
    return ChatPrompt.from_messages(messages, offered.definitions, choice)


def _stored(place: str, reference: InputItem, stored_items: StoredItems) -> InputItem:
    """Look up the stored item that a reference points to. Raises ApiError if it is not stored."""
    require_fields(place, reference, ("id",))
    item = stored_items.get(reference.id or "")
    if item is None:
        raise ApiError(
            404,
            f"{place} refers to the item {(reference.id or '')[:100]}, but the server keeps only the items"
            " of its latest responses; send the items themselves, as clients do with store: false",
            code="item_not_found",
            param=place,
        )
    return InputItem.model_validate_json(item)


def _add(messages: list[dict[str, Any]], place: str, item: InputItem, offered: OfferedTools) -> None:
    """Add an item to the messages. Consecutive items of a reply are combined into one message."""
    match item.form:
        case "message":
            require_fields(place, item, ("role", "content"))
            role = _ROLES.get(item.role or "")
            if role is None:
                roles = ", ".join(_ROLES)
                raise invalid_request(
                    f"{place}.role: must be one of {roles}, not {item.role!r}", param=f"{place}.role"
                )
            if role == "user" and isinstance(item.content, list):
                parts = ((f"{place}.content.{at}", part) for at, part in enumerate(item.content))
                messages.append({"role": role, **content_of(parts)})
                return
            text = text_of(f"{place}.content", item.content)
            if role == "assistant":
                _reply(messages)["content"] += text
            else:
                messages.append({"role": role, "content": text})
        case "reasoning":
            _reply(messages)["reasoning"] += text_of(f"{place}.content", item.content or item.summary)
        case "call":
            _add_call(messages, place, item, offered)
        case "result":
            require_fields(place, item, ("call_id",))
            _add_result(messages, place, item)


def _add_part(messages: list[dict[str, Any]], place: str, item: InputItem, *, goes_on: bool) -> None:
    """Add a content part sent outside of a message. Consecutive parts form one message."""
    role = "assistant" if item.type == "output_text" else "user"
    if role == "assistant":
        _reply(messages)["content"] += part_text(place, item)
        return
    if not (goes_on and messages[-1]["role"] == role):
        messages.append({"role": role, "content": "", "images": [], "parts": []})
    message = messages[-1]
    message["parts"].append((place, item))
    message |= content_of(message["parts"])


def _reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trailing assistant message of the conversation, adding one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "reasoning": "", "tool_calls": []})
    return messages[-1]


def _add_call(messages: list[dict[str, Any]], place: str, item: InputItem, offered: OfferedTools) -> None:
    kind, call_id = item.type or "", item.call_id or item.id
    if kind == "function_call":
        require_fields(place, item, ("call_id", "name"))
    name = offered.offered_name(item.namespace, item.name or kind.removesuffix("_call"))
    given = (getattr(item, field) for field in _CALL_INPUTS)
    arguments = next((each for each in given if each is not None), None)
    if kind != "function_call" and isinstance(arguments, str) and item.arguments is None:
        arguments = {"input": arguments}
    function = {"name": name, "arguments": arguments}
    _reply(messages)["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    if item.has_own_result:
        _add_result(messages, place, item)


def _add_result(messages: list[dict[str, Any]], place: str, item: InputItem) -> None:
    result = item.output if item.output is not None else item.error
    if result is None and item.tools is not None:
        result = [str(tool.get("name", "")) for tool in item.tools if isinstance(tool, dict)]
    content = result_text(f"{place}.output", result)
    messages.append({"role": "tool", "tool_call_id": item.call_id or item.id, "content": content})
