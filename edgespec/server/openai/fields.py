"""Request fields and the error format shared by OpenAI's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import FailFast, Field, field_validator
from typing_extensions import TypeAliasType

from edgespec.server.errors import ApiError, invalid_request
from edgespec.server.fields import Ignored, ReplyFields, RequestFields, reply_options
from edgespec.server.leniency.constraints import ConstraintFields, answer_constraint, constraints_in
from edgespec.server.responses import server_sent_event

__all__ = [
    "MAX_CHOICES",
    "ChoiceFields",
    "OpenAIFields",
    "ReasoningFields",
    "Texts",
    "ToolFields",
    "error_body",
    "error_event",
    "openai_options",
    "requests_options",
    "texts_in",
]

# Maximum number of replies to one request. They wait in the queue like separate requests.
MAX_CHOICES = 16
# Define aliases, because a union cannot contain an annotated type directly.
_Tokens = TypeAliasType("_Tokens", Annotated[list[int], FailFast()])
_Texts = TypeAliasType("_Texts", Annotated[list[str], FailFast()])
_TokenLists = TypeAliasType("_TokenLists", Annotated[list[_Tokens], FailFast()])


Texts: TypeAlias = str | _Texts | _Tokens | _TokenLists
"""One or more texts, each as a string or as a list of token ids."""
_STATES = {"enabled": "on", "disabled": "off", True: "on", False: "off"}


def texts_in(given: Texts) -> list[str | list[int]]:
    """Return the texts in a request as a list."""
    items: Any = given
    return [items] if isinstance(items, str) or isinstance(next(iter(items), None), int) else items


class StreamOptions(RequestFields):
    """Options for an event stream."""

    include_usage: bool | None = Field(
        default=None, description="Send the usage in a separate event, as OpenAI does."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the usage so far in each event, as vLLM does."
    )
    include_obfuscation: Ignored


class OpenAIFields(ReplyFields, ConstraintFields):
    """The fields of all requests that generate text."""

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    stream: bool | None = Field(default=None, description="Send the reply as it is generated.")
    stream_options: StreamOptions | None = None
    metadata: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored
    safety_identifier: Ignored
    service_tier: Ignored
    store: Ignored
    user: Ignored


class ChoiceFields(OpenAIFields):
    """The fields of requests that can generate several replies."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        default=None, description="Number of replies."
    )
    cache_prompt: Ignored
    id_slot: Ignored
    timings_per_token: Ignored


def openai_options(fields: OpenAIFields) -> dict[str, Any]:
    """Return a request's reply options, including any constraint on the answer."""
    options = reply_options(fields)
    return options | answer_constraint(constraints_in(fields, options))


def requests_options(fields: ChoiceFields) -> list[dict[str, Any]]:
    """Return the options for each of the `n` replies, incrementing the seed, if set, for each one."""
    if fields.stream_options and not fields.stream:
        raise invalid_request(
            "stream_options requires stream: true; set stream to true, or leave stream_options out",
            param="stream_options",
        )
    options = openai_options(fields)
    seed = options.get("seed")
    return [
        options if seed is None else {**options, "seed": (seed + index) % (1 << 63)}
        for index in range(fields.n or 1)
    ]


class ToolFields(RequestFields):
    """The fields of requests in which the model can call tools."""

    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the model can call.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="auto, none, required, or the function that the model must call."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false ends the reply after its first call."
    )


class ReasoningFields(RequestFields):
    """The reasoning fields of OpenAI, OpenRouter, vLLM, DeepSeek and Qwen.

    These fields only turn reasoning on or off. Other settings in them, such as a low effort, are ignored.
    """

    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    @field_validator("thinking", mode="before", check_fields=False)
    @classmethod
    def _state(cls, value: Any) -> Any:
        """Accept DeepSeek's form of the option `thinking`, such as `{"type": "disabled"}`."""
        return _STATES.get(str(value.get("type")), value) if isinstance(value, dict) else value

    def reasoning_options(self) -> dict[str, Any]:
        """Return the reply option set by these fields, or an empty dictionary if there is none."""
        return {"thinking": state} if (state := next(iter(self._states().values()), None)) else {}

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets."""
        states = self._states()
        names = [name for name in ReasoningFields.model_fields if getattr(self, name) and name not in states]
        return [*super().ignored_fields(), *names]

    def _states(self) -> dict[str, str]:
        """Return `on` or `off` for each field that turns reasoning on or off."""
        template, reasoning = self.chat_template_kwargs or {}, self.reasoning or {}
        enabled = reasoning.get("enabled")
        given = {
            "reasoning_effort": False if self.reasoning_effort == "none" else None,
            "reasoning": False if reasoning.get("effort") == "none" else enabled,
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs": template.get("enable_thinking", template.get("thinking")),
        }
        return {name: _STATES[value] for name, value in given.items() if isinstance(value, bool)}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }


def error_event(error: ApiError) -> bytes:
    """Return the event that reports an error after the stream has started."""
    return server_sent_event(error_body(error))
