"""Convert the messages and tools of Anthropic's API to a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from edgespec.chat.tool_calls.tool_set import ToolChoice
from edgespec.server.anthropic.fields import (
    AnthropicCountRequest,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlock,
)
from edgespec.server.errors import invalid_request, unsupported_content
from edgespec.server.fields import require_fields
from edgespec.server.generation import ChatPrompt

__all__ = ["chat_prompt"]

# Claude Code writes this line at the start of the system prompt. It changes with every request, so nothing
# after it could be reused from the prefix cache.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# The required fields of each type of block.
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


def chat_prompt(fields: AnthropicCountRequest) -> ChatPrompt:
    """Convert the conversation and the tools of a request.

    Raises:
        ApiError: A message contains an image or anything else that is not text, or a block is incomplete.
    """
    system = _BILLING_HEADER.sub("", _text("system", fields.system))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(fields.messages):
        messages += _converted(f"messages.{index}.content", message)
    tools = [_tool(tool) for tool in fields.tools or () if tool.is_function]
    return ChatPrompt.from_messages(messages, tools, _tool_choice(fields.tool_choice))


def _converted(place: str, message: AnthropicMessage) -> list[dict[str, Any]]:
    """Convert a message. Each tool result in it becomes a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts, reasoning, calls, results = [], "", [], []
    for number, block in enumerate(message.content):
        at = f"{place}.{number}"
        _check(at, block)
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                reasoning += block.thinking or ""
            case "tool_use":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                content = _text(f"{at}.content", block.content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if results and not (texts or reasoning or calls):
        return results
    # The text blocks of a reply are the parts of one text, split by tool calls. Other blocks are separate
    # texts.
    content = ("" if message.role == "assistant" else "\n").join(texts)
    converted = {"role": message.role, "content": content, "reasoning": reasoning, "tool_calls": calls}
    return [*results, converted]


def _text(place: str, content: str | Sequence[ContentBlock] | None) -> str:
    """Return the text of content. Raises ApiError if the content contains anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    for number, block in enumerate(content):
        if block.type != "text":
            raise unsupported_content(block.type, param=f"{place}.{number}")
        _check(f"{place}.{number}", block)
    return "\n".join(block.text or "" for block in content)


def _check(place: str, block: ContentBlock) -> None:
    """Raise ApiError if the type of a block is not supported, or if a required field is missing."""
    if block.type not in _NEEDED:
        raise unsupported_content(block.type, param=place)
    require_fields(place, block, _NEEDED[block.type])


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise invalid_request(
            "tool_choice has type tool, but no name; add tool_choice.name", param="tool_choice.name"
        )
    return {"type": "function", "function": {"name": choice.name}}
