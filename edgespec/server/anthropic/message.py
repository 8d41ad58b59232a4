"""Build the message of a reply, and the events that stream it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import TypedDict

from edgespec import Reply, Stats, TextChunk
from edgespec.chat.tool_calls.calls import parse_object
from edgespec.server.openai.report import ReplyReport, Timings
from edgespec.server.reply_builder import Event

__all__ = ["AnthropicReply", "MessageBuilder"]

# Placeholder for the signature of reasoning. Clients drop unsigned reasoning from their next request.
_SIGNATURE = "edgespec"


class AnthropicUsage(TypedDict):
    """Token counts. `input_tokens` excludes tokens that were found in the prefix cache."""

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
    """Builds the message of one reply. See `ReplyBuilder`."""

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
        # The arguments of the tool call that is being written, as JSON text.
        self._arguments = ""
        self._is_open = False

    def start(self, model: str, stats: Stats) -> Iterator[Event]:
        """Begin the message."""
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
        """End the message."""
        yield from self._close()
        # If the reply ended in the middle of a tool call, leave the call out, because its arguments are
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
        """Yield the events that end the open block, if there is one."""
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
