"""The body of a request to create a response."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from edgespec.server.fields import Ignored, ItemFields, RequestFields
from edgespec.server.openai.fields import OpenAIFields
from edgespec.server.openai.reasoning import ReasoningFields

__all__ = ["LOGPROBS", "InputItem", "InputPart", "ResponsesRequest", "TextFormat"]

# The value of `include` that asks for log-probabilities.
LOGPROBS = "message.output_text.logprobs"


class InputPart(ItemFields):
    """A part of a message's content. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


# Defined as an alias, because a union cannot contain an annotated type directly.
_Parts = TypeAliasType("_Parts", Annotated[list[InputPart], FailFast()])


class InputItem(ItemFields):
    """An item of the conversation. `chat_prompt` checks the fields that its type requires."""

    type: str | None = Field(default=None, description="Defaults to message.")
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | _Parts | None = None
    summary: _Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | _Parts | None = None


_Items = TypeAliasType("_Items", Annotated[list[InputItem], Field(min_length=1), FailFast()])


class TextFormat(RequestFields):
    """The format of the answer: any text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    name: Ignored
    description: Ignored
    strict: Ignored


class TextConfig(RequestFields):
    """Settings for the answer."""

    format: TextFormat | None = None
    verbosity: Ignored


class ResponsesRequest(ReasoningFields, OpenAIFields):
    """The body of a request to create a response."""

    prompt_field = "input"
    advice = MappingProxyType(
        {
            "conversation": "the server stores no conversations; send the whole conversation in input",
            "messages": "use input, or POST /v1/chat/completions",
            "n": "a response has one reply; send the request several times",
            "prompt": "the server stores no prompts; use instructions and input",
        }
    )

    input: str | _Items = Field(description="The user's message, or the whole conversation.")
    instructions: str | None = Field(default=None, description="The system prompt.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like max_tokens."
    )
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model can call.")
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = Field(
        default=None, description="auto, none, required, or the function that the model must call."
    )
    include: list[str] | None = Field(default=None, description=f"{LOGPROBS} asks for log-probabilities.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Number of the most likely tokens to return at each position."
    )
    previous_response_id: str | None = Field(
        default=None, description="Not supported, because the server stores no responses."
    )
    background: bool | None = Field(default=None, description="true is not supported.")
    store: bool | None = Field(
        default=None, description="false: later requests will not refer to the items of the response by id."
    )
    client_metadata: Ignored
    max_tool_calls: Ignored
    parallel_tool_calls: Ignored
    prompt_cache_options: Ignored
    truncation: Ignored

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields and the positions of the skipped list items."""
        tools = [f"tools.{at}" for at, tool in enumerate(self.tools or ()) if tool.get("type") != "function"]
        include = [f"include.{at}" for at, name in enumerate(self.include or ()) if name != LOGPROBS]
        return [*super().ignored_fields(), *tools, *include]
