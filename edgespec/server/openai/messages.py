"""The messages of a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast
from typing_extensions import TypeAliasType

from edgespec.chat.tool_calls.tool_set import ToolChoice
from edgespec.server.errors import unsupported_content
from edgespec.server.fields import Ignored, ItemFields
from edgespec.server.generation import ChatPrompt

__all__ = ["ChatMessage", "chat_prompt"]


class ContentPart(ItemFields):
    """A part of a message's content. Only text is supported."""

    type: str
    text: str | None = None


# Defined as an alias, because a union cannot contain an annotated type directly.
_Parts = TypeAliasType("_Parts", Annotated[list[ContentPart], FailFast()])


class ChatMessage(ItemFields):
    """A message of the conversation. Fields that other servers add to their replies are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _Parts | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # OpenAI's older form of a tool call. When its Python client converts a reply to a dict, this is null.
    function_call: None = None
    name: Ignored
    refusal: Ignored
    annotations: Ignored
    audio: Ignored


def chat_prompt(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), tool_choice: ToolChoice = "auto"
) -> ChatPrompt:
    """Convert the messages of a request.

    Raises:
        ApiError: A message contains an image or anything else that is not text.
    """
    converted = [_converted(index, message) for index, message in enumerate(messages)]
    return ChatPrompt.from_messages(converted, tools, tool_choice)


def _converted(index: int, message: ChatMessage) -> dict[str, Any]:
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(index, message),
        "reasoning": message.reasoning_content or message.reasoning or "",
        **({"tool_calls": message.tool_calls} if message.tool_calls else {}),
        **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
    }


def _text(index: int, message: ChatMessage) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise unsupported_content(part.type, param=f"messages.{index}.content.{number}")
        texts.append(part.text)
    return "\n".join(texts)
