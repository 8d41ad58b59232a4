"""Handle `POST /api/chat`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import FailFast, Field
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.server.fields import ItemFields, ignored_in_messages
from edgespec.server.generation import ChatPrompt, ReplyRequest
from edgespec.server.ollama.fields import OllamaFields, options_of, refuse_images
from edgespec.server.ollama.replying import OllamaPart, OllamaReply, load_model, respond
from edgespec.server.protocol import Call

__all__ = ["OllamaChat", "OllamaChatRequest", "chat"]


class OllamaMessage(ItemFields):
    """A message of the conversation. Fields of other servers are ignored."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


# Defined as an alias, because a union cannot contain an annotated type directly.
_Messages = TypeAliasType("_Messages", Annotated[list[OllamaMessage], FailFast()])


class OllamaChatRequest(OllamaFields):
    """The body of a chat request. Without messages, it loads the model."""

    messages: _Messages | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model can call.")
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = Field(
        default=None, description="As in OpenAI's API: auto, none, required, or the function to call."
    )

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets, including those of messages."""
        return [*super().ignored_fields(), *ignored_in_messages(self.messages or ())]


class OllamaReplyMessage(TypedDict):
    """The message of a reply, or a part of it."""

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaChat(OllamaReply):
    """The response to a chat request."""

    message: OllamaReplyMessage


async def chat(call: Call[OllamaChatRequest]) -> Response:
    """Reply to the messages of a request."""
    body = call.body
    if not body.messages:
        return await load_model(call, _formatted)
    messages = [_converted(index, message) for index, message in enumerate(body.messages)]
    prompt = ChatPrompt.from_messages(messages, body.tools or (), body.tool_choice or "auto")
    return await respond(call, ReplyRequest(prompt, options_of(body)), _formatted)


def _converted(index: int, message: OllamaMessage) -> dict[str, Any]:
    refuse_images(message.images, f"messages.{index}.images")
    return {
        "role": message.role,
        "content": message.content or "",
        "reasoning": message.thinking or "",
        "tool_calls": message.tool_calls or (),
        "tool_call_id": message.tool_call_id or "",
        "name": message.tool_name or "",
    }


def _formatted(part: OllamaPart) -> dict[str, Any]:
    message: OllamaReplyMessage = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if calls := [call for index, each in enumerate(part.tool_calls) if (call := _call(index, each))]:
        message["tool_calls"] = calls
    return {"message": message}


def _call(index: int, call: ToolCall) -> dict[str, Any] | None:
    """Return a tool call in Ollama's format, or None if the reply ended within its arguments."""
    arguments = parse_object(call.arguments)
    if arguments is None:
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}
