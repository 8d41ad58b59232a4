"""Build the response of a reply, and the events that stream it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import TypedDict

from edgespec import Reply, Stats, TextChunk
from edgespec.server.errors import ApiError
from edgespec.server.openai.logprobs import chat_logprobs
from edgespec.server.openai.report import ReplyReport, Timings
from edgespec.server.openai.responses.fields import ResponsesRequest
from edgespec.server.reply_builder import Event
from edgespec.server.responses import server_sent_event
from edgespec.server.stored_items import StoredItems

__all__ = ["ResponseBuilder", "ResponseObject"]

# Prefixes of ids, as in OpenAI's API.
_PREFIXES = {"response": "resp", "message": "msg", "reasoning": "rs", "function_call": "fc"}


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
    """Builds the response of one reply. See `ReplyBuilder`.

    Args:
        body: The request.
        stored_items: Where to keep the items of the response. None keeps nothing.
    """

    def __init__(self, body: ResponsesRequest, stored_items: StoredItems | None) -> None:
        self._stored_items = stored_items
        self.response: dict[str, Any] = {
            "id": _new_id("response"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": "",
            "instructions": body.instructions,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": True,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        self._items: list[dict[str, Any]] = self.response["output"]
        self._event_count = 0
        # The type of the item that is being written, or None.
        self._open_kind: str | None = None
        self._reasoning_tokens = 0

    def start(self, model: str, stats: Stats) -> Iterator[Event]:  # noqa: ARG002
        """Begin the response."""
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
                yield from self._open("function_call", call_id=call.id, name=call.name, arguments="")
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._item_event("function_call_arguments.delta", delta=call.arguments)
        elif chunk.text or (chunk.logprobs and self._open_kind == kind):
            if self._open_kind != kind:
                yield from self._open_text(kind)
            yield self._add_text(chunk)

    def finish(self, reply: Reply, more: Mapping[str, Any]) -> Iterator[Event]:
        """End the response."""
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
        details = {"code": error.code or "server_error", "message": error.message}
        self.response.update(status="failed", error=details)
        return server_sent_event(self._event("response.failed", response=self.response), "response.failed")

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": _new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open_kind = kind
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _open_text(self, kind: str) -> Iterator[Event]:
        """Yield the events that start an item with text."""
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
        logprobs = chat_logprobs(chunk.logprobs)["content"]
        part["logprobs"] += logprobs
        return self._item_event("output_text.delta", content_index=0, delta=chunk.text, logprobs=logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        """Yield the events that end the open item, if there is one."""
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
        """Return an event about a part of the last item."""
        index = len(self._items) - 1
        return self._event(f"response.{name}", item_id=self._items[index]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return event


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
