"""The request bodies of Anthropic's endpoints."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from edgespec.server.fields import Ignored, ItemFields, ReplyFields, RequestFields, ignored_in_messages

__all__ = [
    "AnthropicCountRequest",
    "AnthropicMessage",
    "AnthropicMessageRequest",
    "AnthropicTool",
    "AnthropicToolChoice",
    "ContentBlock",
]


class ContentBlock(ItemFields):
    """A part of a message's content. `chat_prompt` checks the fields that its type requires."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | _Blocks | None = None


# Defined as an alias, because a union cannot contain an annotated type directly.
_Blocks = TypeAliasType("_Blocks", Annotated[list[ContentBlock], FailFast()])


class AnthropicMessage(ItemFields):
    """A message of the conversation. Fields of other servers are ignored."""

    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class AnthropicTool(ItemFields):
    """A tool. Tools with a special type, such as web search, run on Anthropic's servers."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None

    @property
    def is_function(self) -> bool:
        """Whether the client runs the tool, as opposed to Anthropic's servers."""
        return self.type in (None, "custom")


class AnthropicToolChoice(RequestFields):
    """The field that says whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Ignored


class ThinkingConfig(RequestFields):
    """The field that turns reasoning on or off."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored
    display: Ignored

    @property
    def option(self) -> str:
        """The value for the reply option `thinking`: `on`, `off` or `auto`."""
        return {"enabled": "on", "disabled": "off"}.get(self.type, "auto")


class OutputFormat(RequestFields):
    """The format of the answer: JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestFields):
    """Settings for the answer."""

    format: OutputFormat | None = None
    effort: Ignored


class Thread(RequestFields):
    """The field that asks Anthropic's servers to keep the conversation, to shorten the next request."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class AnthropicCountRequest(RequestFields):
    """The body of a token count request."""

    ignores_unknown = True
    advice = MappingProxyType(
        {
            "container": "the server runs no code; leave it out",
            "mcp_servers": "the server calls no tools; call the tools of MCP servers in your program",
        }
    )

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), FailFast()]
    system: str | _Blocks | None = Field(default=None, description="The system prompt.")
    tools: list[AnthropicTool] | None = Field(default=None, description="Tools that the model can call.")
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="Like output_config.format.")
    cache_control: Ignored
    context_management: Ignored
    speed: Ignored
    user_profile_id: Ignored
    workspace_id: Ignored

    @property
    def answer_format(self) -> OutputFormat | None:
        """The format of the answer, from either of the two fields that can set it."""
        return self.output_format or (self.output_config.format if self.output_config else None)

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the positions of the skipped tools."""
        skipped = [f"tools.{at}" for at, tool in enumerate(self.tools or ()) if not tool.is_function]
        return [*super().ignored_fields(), *ignored_in_messages(self.messages), *skipped]


class AnthropicMessageRequest(AnthropicCountRequest, ReplyFields):
    """The body of a message request."""

    stream: bool | None = Field(default=None, description="Send the reply as it is generated.")
    stop_sequences: list[str] | None = Field(default=None, description="Like stop.")
    thread: Thread | None = Field(
        default=None, description="create is ignored, because the server stores no conversations."
    )
    diagnostics: Ignored
    inference_geo: Ignored
    metadata: Ignored
    service_tier: Ignored

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the positions of the skipped tools."""
        return [*super().ignored_fields(), *(["thread"] if self.thread else [])]
