"""Convert the input and the tools of a response request to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.chat.tool_calls.tool_set import ToolChoice
from edgespec.server.errors import ApiError, invalid_request, unsupported_content
from edgespec.server.fields import require_fields
from edgespec.server.generation import ChatPrompt
from edgespec.server.openai.responses.fields import InputItem, InputPart, ResponsesRequest
from edgespec.server.stored_items import StoredItems

__all__ = ["chat_prompt"]

# The required fields of each type of item.
_NEEDED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_prompt(body: ResponsesRequest, stored_items: StoredItems) -> ChatPrompt:
    """Convert the conversation and the tools of a request.

    Args:
        body: The request.
        stored_items: Items of recent responses, which the conversation can refer to.

    Raises:
        ApiError: An item contains an image or anything else that is not text, is incomplete, or refers to an
            item that is not stored.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            place = f"input.{index}"
            _add(
                messages, place, _stored(place, item, stored_items) if item.type == "item_reference" else item
            )
    tools = [_tool(tool) for tool in body.tools or () if tool.get("type") == "function"]
    return ChatPrompt.from_messages(messages, tools, _tool_choice(body.tool_choice))


def _stored(place: str, reference: InputItem, stored_items: StoredItems) -> InputItem:
    """Return the item of an earlier response that an item refers to."""
    require_fields(place, reference, ("id",))
    item = stored_items.get(reference.id or "")
    if item is None:
        raise ApiError(
            404,
            f"{place} refers to the item {(reference.id or '')[:100]}, but the server keeps only items of"
            " its latest responses; send the items themselves, which clients do with store: false",
            code="item_not_found",
            param=place,
        )
    return InputItem.model_validate_json(item)


def _add(messages: list[dict[str, Any]], place: str, item: InputItem) -> None:
    """Add an item to the messages. The items of a reply become parts of one message."""
    kind = item.type or "message"
    if kind not in _NEEDED:
        raise invalid_request(
            f"{place} has type {kind[:40]!r}, which edgespec does not support; use one of the types"
            f" {', '.join(_NEEDED)}, item_reference",
            param=place,
            code="unsupported_content",
        )
    require_fields(place, item, _NEEDED[kind])
    if kind == "function_call_output":
        content = _text(f"{place}.output", item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif kind == "message" and item.role != "assistant":
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": _text(f"{place}.content", item.content)})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "reasoning": "", "tool_calls": []})
        _add_to_reply(messages[-1], place, item)


def _add_to_reply(message: dict[str, Any], place: str, item: InputItem) -> None:
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        message["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
    elif item.type == "reasoning":
        message["reasoning"] += _text(f"{place}.content", item.content or item.summary)
    else:
        message["content"] += _text(f"{place}.content", item.content)


def _text(place: str, content: str | Sequence[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        name = "refusal" if part.type == "refusal" else "text"
        if name == "text" and part.type not in _TEXTS:
            raise unsupported_content(part.type, param=f"{place}.{number}")
        require_fields(f"{place}.{number}", part, (name,))
        texts.append(getattr(part, name))
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: v for name, v in function.items() if v is not None}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> ToolChoice:
    match choice:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required":
            return "required"
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise invalid_request(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "name": NAME}',
        param="tool_choice",
    )
