"""Handle `POST /api/chat`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import FailFast, Field, model_validator
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.server.fields import ItemFields
from edgespec.server.generation import ChatPrompt, ReplyRequest
from edgespec.server.leniency.content import (
    SystemPrompt,
    omitted_parts,
    plain_message,
    result_text,
    system_messages,
    text_of,
)
from edgespec.server.leniency.tools import checked_choice, offered_tools, skipped_tools
from edgespec.server.ollama.fields import OllamaFields, options_of, read_images
from edgespec.server.ollama.replying import OllamaPart, OllamaReply, load_model, respond
from edgespec.server.protocol import Call

__all__ = ["OllamaChat", "OllamaChatRequest", "chat"]


class OllamaMessage(ItemFields):
    """A message of the conversation. Fields of other servers are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        return plain_message(data) if isinstance(data, dict) else data


# Define an alias, because a union cannot contain an annotated type directly.
_Messages = TypeAliasType("_Messages", Annotated[list[OllamaMessage], FailFast()])


class OllamaChatRequest(OllamaFields):
    """The body of a chat request. Without messages, it loads the model."""

    advice = MappingProxyType({"prompt": "use messages, or POST /api/generate"})

    messages: _Messages | None = None
    system: SystemPrompt = Field(default=None, description="A system prompt before the messages.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model can call.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="As in OpenAI's API: auto, none, required, or the function to call."
    )

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the locations of skipped tools and parts."""
        omitted = [
            place
            for index, message in enumerate(self.messages or ())
            if message.role == "tool"
            for place in omitted_parts(f"messages.{index}.content", message.content)
            + [f"messages.{index}.images"] * bool(message.images)
        ]
        return [*super().ignored_fields(), *skipped_tools(self.tools or ()), *omitted]


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
    converted = [_converted(index, message) for index, message in enumerate(body.messages)]
    messages = [*system_messages(body.system), *converted]
    offered = offered_tools(body.tools or ())
    choice = checked_choice(body.tool_choice, offered, body.tools or ())
    prompt = ChatPrompt.from_messages(messages, offered.definitions, choice)
    return await respond(call, ReplyRequest(prompt, options_of(body)), _formatted)


def _converted(index: int, message: OllamaMessage) -> dict[str, Any]:
    place, images = f"messages.{index}.content", []
    if message.role == "tool":
        # An agent cannot take back a tool result, so images in it must not end the conversation.
        notes = ["[image omitted: text only]"] * len(message.images or ())
        content = "\n".join(filter(None, [result_text(place, message.content), *notes]))
    else:
        content = text_of(place, message.content)
        images = read_images(message.images, f"messages.{index}.images")
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        "images": images,
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
