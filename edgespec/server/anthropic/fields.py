"""The request bodies of Anthropic's endpoints."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from edgespec.server.fields import Ignored, ItemFields, ReplyFields, RequestFields
from edgespec.server.leniency.constraints import ConstraintFields
from edgespec.server.leniency.content import is_text, omitted_parts, plain_message
from edgespec.server.leniency.tools import skipped_tools

__all__ = [
    "AnthropicCountRequest",
    "AnthropicMessage",
    "AnthropicMessageRequest",
    "ContentBlock",
    "is_skipped",
]


class ContentBlock(ItemFields):
    """A part of a message's content. `chat_prompt` checks the fields required by its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    source: dict[str, Any] | None = None
    content: str | _Blocks | None = None


# Define an alias, because a union cannot contain an annotated type directly.
_Blocks = TypeAliasType("_Blocks", Annotated[list[ContentBlock], FailFast()])


class AnthropicMessage(ItemFields):
    """A message of the conversation. Fields of other servers are ignored."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Blocks
    tool_calls: list[dict[str, Any]] | None = Field(default=None, description="As in OpenAI's API.")

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        return plain_message(data) if isinstance(data, dict) else data


def is_skipped(message: AnthropicMessage, block: ContentBlock) -> bool:
    """Return whether a block is omitted from the prompt.

    Replies from Anthropic's own models can contain blocks about tools that ran on Anthropic's servers. An
    agent cannot take them back, so they must not make the conversation fail.
    """
    known = ("thinking", "redacted_thinking", "tool_use", "tool_result")
    return message.role == "assistant" and not is_text(block) and block.type not in known


class ThinkingConfig(RequestFields):
    """The field that turns reasoning on or off."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored
    display: Ignored

    @property
    def option(self) -> str:
        """The value for the reply option `thinking`: `on`, `off` or `auto`."""
        return {"enabled": "on", "disabled": "off"}.get(self.type, "auto")


class Thread(RequestFields):
    """The field that asks Anthropic's servers to store the conversation, to shorten the next request."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class AnthropicCountRequest(ConstraintFields):
    """The body of a token count request."""

    advice = MappingProxyType(
        {
            "container": "the server runs no code; leave it out",
            "mcp_servers": "the server calls no tools; call the tools of MCP servers in your program",
        }
    )

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), FailFast()]
    system: str | _Blocks | None = Field(default=None, description="The system prompt.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Tools that the model can call.")
    tool_choice: str | dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    reasoning_effort: str | None = Field(
        default=None, description="none turns reasoning off, unless thinking is set. Others are ignored."
    )
    cache_control: Ignored
    context_management: Ignored
    speed: Ignored
    user_profile_id: Ignored
    workspace_id: Ignored

    @property
    def thinking_option(self) -> str | None:
        """The value for the reply option `thinking`, or None if the request does not set it."""
        if self.thinking:
            return self.thinking.option
        return "off" if self.reasoning_effort == "none" else None

    @property
    def client_tools(self) -> list[dict[str, Any]]:
        """The tools, without the type `custom`, which has a different meaning in OpenAI's API."""
        return [{**tool, "type": None} if tool.get("type") == "custom" else tool for tool in self.tools or ()]

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the positions of the skipped tools."""
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
        """Return the names of the ignored fields and the positions of the skipped tools."""
        return [*super().ignored_fields(), *(["thread"] if self.thread else [])]


def _omitted(messages: list[AnthropicMessage]) -> list[str]:
    """Return the locations of skipped blocks and of non-text parts of tool results."""
    places = []
    for index, message in enumerate(messages):
        for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages.{index}.content.{number}"
            if is_skipped(message, block):
                places.append(place)
            elif block.type == "tool_result":
                places += omitted_parts(f"{place}.content", block.content)
    return places
