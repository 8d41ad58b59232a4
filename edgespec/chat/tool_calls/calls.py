"""Tool-call types: `ToolCall` for complete calls, and `ToolCallDelta` for parts of streamed calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import OptionError

__all__ = ["ToolCall", "ToolCallDelta", "as_tool_calls", "collect_calls", "parse_object", "read_arguments"]

_NO_ARGUMENTS = "{}"
# Maximum number of times to decode arguments. Some programs wrap their JSON text in another JSON string.
_MAX_ARGUMENT_LEVELS = 3


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call written by the model.

    Attributes:
        id: Identifies the call in the message with its result.
        name: The tool's name, as the model wrote it. There may be no tool with this name.
        arguments: The arguments as JSON text, which is incomplete if the reply ended within the call.
    """

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, with arguments as an object if they are valid."""
        written = read_arguments(self.arguments)
        parsed = parse_object(written)
        arguments = written if parsed is None else parsed
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call in a streamed reply.

    Attributes:
        index: The index of the call in `Reply.tool_calls`.
        id: The call's id in its first part, and an empty string in later parts.
        name: The tool's name in the call's first part, and an empty string in later parts.
        arguments: The next part of the arguments' JSON text.
    """

    index: int
    id: str
    name: str
    arguments: str


def collect_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Assemble tool calls from their parts."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return tuple(calls)


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse text as a JSON object. Return None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_arguments(given: Any) -> str:
    """Return a call's arguments as JSON text, converted to an object if possible.

    Programs send an object, JSON text, or doubly encoded JSON text. If there are no arguments, they send an
    empty string, an empty list or null.

    Raises:
        TypeError: The arguments are neither text nor a JSON value.
    """
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    inner = text
    for _ in range(_MAX_ARGUMENT_LEVELS):
        if not inner.strip():
            return _NO_ARGUMENTS
        try:
            value = json.loads(inner)
        except (ValueError, RecursionError):
            break
        if value is None or value == []:
            return _NO_ARGUMENTS
        if isinstance(value, dict):
            return inner
        if not isinstance(value, str):
            break
        inner = value
    return text


def as_tool_calls(number: int, items: Any) -> tuple[ToolCall, ...]:
    """Convert the tool calls of message `number`, given as `ToolCall` objects or in OpenAI's format.

    Raises:
        OptionError: A call is invalid.
    """
    if not isinstance(items, list | tuple):
        raise OptionError(
            f"the tool_calls of message {number} must be a list, not {type(items).__name__}",
            "pass the `tool_calls` of the model's reply",
            code="messages_invalid",
        )
    return tuple(item if isinstance(item, ToolCall) else _as_tool_call(number, item) for item in items)


def _as_tool_call(number: int, item: Any) -> ToolCall:
    function = item.get("function") if isinstance(item, Mapping) else None
    if isinstance(function, Mapping):
        call_id, name, arguments = item.get("id") or "", function.get("name"), function.get("arguments")
        is_valid = arguments is None or isinstance(arguments, str | Mapping) or arguments == []
        if isinstance(call_id, str) and isinstance(name, str) and is_valid:
            given = dict(arguments) if isinstance(arguments, Mapping) else arguments
            return ToolCall(call_id, name, read_arguments(given))
    raise OptionError(
        f"message {number} has an invalid tool call: {item!r}"[:300],
        'pass dictionaries such as {"id": "call_1", "type": "function",'
        ' "function": {"name": "add", "arguments": "{}"}}',
        code="messages_invalid",
    )
