"""Handle `POST /api/chat` and `POST /api/generate`.

Replies are sent as JSON or as a stream of JSON lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, FailFast, Field, model_validator
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec import Reply, TextChunk
from edgespec.chat.message import PlacedImage
from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.endpoint import Call, endpoint
from edgespec.server.errors import ApiError, invalid_request
from edgespec.server.fields import Ignored, ItemFields, Off, One, ReplyFields, reply_options
from edgespec.server.generation import ChatPrompt, Generation, GenerationRequest, RawPrompt
from edgespec.server.leniency.constraints import ConstraintFields, answer_constraint, constraints_in
from edgespec.server.leniency.content import (
    SystemPrompt,
    omitted_parts,
    plain_message,
    read_image,
    result_text,
    system_messages,
    text_of,
)
from edgespec.server.leniency.tools import checked_choice, offered_tools, skipped_tools
from edgespec.server.openai.logprobs import ContentLogprob, LogprobFields, chat_logprobs
from edgespec.server.openai.report import ReplyReport, report
from edgespec.server.responses import json_line, json_response, open_stream

__all__ = [
    "RENAMED",
    "STREAM_MEDIA_TYPE",
    "OllamaChatRequest",
    "OllamaFields",
    "OllamaGenerateRequest",
    "chat",
    "error_body",
    "generate",
    "options_of",
]

STREAM_MEDIA_TYPE = "application/x-ndjson"
_UNSUPPORTED = {
    "suffix": "edgespec cannot fill in text before a suffix; leave suffix out",
    "template": "edgespec uses the chat template of the model; leave template out, or use raw: true",
    "context": "edgespec does not return Ollama's context; send the whole conversation to /api/chat instead",
}
RENAMED = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
}
"""Maps Ollama's option names to edgespec's where they differ."""

# Ollama parses durations as Go does, such as `1h30m`. Clients also send numbers of seconds as text.
_DURATION = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|[µμ]s|ms|s|m|h))+)")


def _duration(value: float | str | None) -> float | str | None:
    """Validate `keep_alive`. An empty string means that it is not set. Raises ValueError."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, str) and text and not _DURATION.fullmatch(text):
        raise ValueError("must be a number of seconds or a time such as 5m; 0 unloads the model")
    return None if text == "" else text


class OllamaOptions(ReplyFields, ConstraintFields):
    """The field `options`, which accepts Ollama's and edgespec's option names.

    Some options are ignored. Most of them control how a model is loaded, which `edgespec serve` has already
    decided. Ignoring `num_ctx` is safe, because a prompt that exceeds the model's context is an error. The
    others control features that edgespec does not have, and are ignored only if they turn the feature off.
    """

    num_predict: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like max_tokens. -1 and -2 mean the default."
    )
    repeat_penalty: float | None = Field(default=None, description="Like repetition_penalty.")
    repeat_last_n: int | None = Field(default=None, description="Like penalty_window.")
    embedding_only: Off
    # LangExtract also puts `keep_alive` into `options`, where it has no effect.
    keep_alive: Ignored
    f16_kv: Ignored
    logits_all: Off
    low_vram: Ignored
    main_gpu: Ignored
    mirostat: Off
    mirostat_eta: Ignored
    mirostat_tau: Ignored
    num_batch: Ignored
    num_ctx: Ignored
    num_gpu: Ignored
    num_keep: Ignored
    num_thread: Ignored
    numa: Ignored
    penalize_newline: One
    tfs_z: One
    use_mlock: Ignored
    use_mmap: Ignored
    vocab_only: Off


class OllamaFields(LogprobFields, ReplyFields, ConstraintFields):
    """Fields shared by chat and generate requests.

    Reply options belong in `options`. Ollama ignores them elsewhere, but some clients, such as an AI SDK
    provider, set them at the top level, so they are accepted there too.
    """

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    stream: bool | None = Field(default=None, description="false returns the whole reply at once.")
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        default=None, description="Whether the model should reason. Any level counts as true."
    )
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like num_predict."
    )
    keep_alive: Annotated[float | str | None, AfterValidator(_duration)] = Field(
        default=None, description="0 unloads the model after the request. Other values are ignored."
    )
    num_ctx: Ignored
    shift: Ignored
    truncate: Ignored

    @property
    def unloads(self) -> bool:
        """Whether to unload the model after the request."""
        # A duration is zero if all of its numbers are, as in `0h0m`.
        return self.keep_alive == 0 or (
            isinstance(self.keep_alive, str) and not re.search("[1-9]", self.keep_alive)
        )

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets, including `keep_alive`."""
        kept = [] if self.keep_alive is None or self.unloads else ["keep_alive"]
        return [*kept, *super().ignored_fields()]

    @classmethod
    def known_fields(cls) -> list[str]:
        """Return the names of all fields, including those in `options`."""
        return [*super().known_fields(), *(f"options.{name}" for name in OllamaOptions.known_fields())]


def options_of(fields: OllamaFields) -> dict[str, Any]:
    """Return the reply options that a request sets, keyed by their edgespec names."""
    options = reply_options(fields)
    constraints = constraints_in(fields, options)
    options.pop("logprobs", None)  # The field of this name is Ollama's.
    if fields.max_output_tokens is not None:
        options["max_tokens"] = fields.max_output_tokens
    if fields.options:
        inner = reply_options(fields.options)
        constraints |= constraints_in(fields.options, inner, "options.")
        options |= inner
    for theirs, ours in RENAMED.items():
        if (value := getattr(fields.options, theirs, None)) is not None:
            options[ours] = value
    if fields.think is not None:
        options["thinking"] = "on" if fields.think else "off"
    options |= answer_constraint(constraints)
    if fields.wanted_logprobs is not None:
        options["logprobs"] = fields.wanted_logprobs
    return options


def _read_images(images: list[str] | None, place: str) -> list[PlacedImage]:
    """Decode a message's images, which precede its text. Raises ApiError if an image cannot be read."""
    return [PlacedImage(read_image(f"{place}.{at}", data)) for at, data in enumerate(images or ())]


class OllamaReply(TypedDict):
    """The fields common to chat and generate responses. All times are in nanoseconds.

    In a stream, only the last line contains the counts and times.
    """

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ContentLogprob]]
    edgespec: NotRequired[ReplyReport]


@dataclass(frozen=True, slots=True)
class OllamaPart:
    """A part of a streamed reply, or a whole reply."""

    text: str = ""
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()


Formatter = Callable[[OllamaPart], Mapping[str, Any]]
"""A function that returns the response fields for a part of a reply."""


async def respond(call: Call[Any], request: GenerationRequest, formatted: Formatter) -> Response:
    """Generate a reply and return the response: a stream, unless the request has `stream: false`.

    Args:
        call: A request whose body is an `OllamaFields`.
        request: The reply to generate.
        formatted: Formats the parts of the reply.
    """
    fields: OllamaFields = call.body
    if fields.stream is not False:
        return await open_stream(_stream(call, request, formatted), _error_line, STREAM_MEDIA_TYPE)
    started = time.perf_counter_ns()
    async with call.service.generate(fields.model, [request]) as generation:
        (reply,) = await generation.replies()
        raw = isinstance(request.prompt, RawPrompt)
        part = OllamaPart(reply.text) if raw else OllamaPart(reply.answer, reply.reasoning, reply.tool_calls)
        logprobs = _logprobs(reply.logprobs) if fields.wanted_logprobs is not None else {}
        head = _head(generation.model_name)
        end = _end(fields, reply, generation, started)
        response = json_response({**head, **formatted(part), **logprobs, **end})
    if fields.unloads:
        await call.service.models.unload(fields.model)
    return response


async def _stream(
    call: Call[Any], request: GenerationRequest, formatted: Formatter
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a streamed reply. Tool calls follow the text, because Ollama sends them whole."""
    fields: OllamaFields = call.body
    started = time.perf_counter_ns()
    async with call.service.generate(fields.model, [request]) as generation:
        raw = isinstance(request.prompt, RawPrompt)
        async for _, event in generation.events():
            head = _head(generation.model_name)
            if isinstance(event, TextChunk):
                part = _part(event, raw)
                logprobs = _logprobs(event.logprobs) if event.logprobs else {}
                if part.text or part.thinking or logprobs:
                    yield _line({**head, **formatted(part), **logprobs})
                continue
            if event.tool_calls and not raw:
                yield _line({**head, **formatted(OllamaPart(tool_calls=event.tool_calls))})
            end = _end(fields, event, generation, started)
            yield _line({**head, **formatted(OllamaPart()), **end})
    if fields.unloads:
        await call.service.models.unload(fields.model)


async def load_model(call: Call[Any], formatted: Formatter) -> Response:
    """Load the model for a request without a prompt, as Ollama does, so that the next reply starts faster.

    With `keep_alive: 0`, the model is unloaded instead.
    """
    fields: OllamaFields = call.body
    models = call.service.models
    found = await models.find(fields.model, prepare=not fields.unloads)
    if fields.unloads:
        await models.unload(fields.model)
        reason = "unload"
    else:
        async with models.borrow(found):
            reason = "load"
    return json_response(
        {**_head(found.name), **formatted(OllamaPart()), "done": True, "done_reason": reason}
    )


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": error.message}


def _error_line(error: ApiError) -> bytes:
    return _line(error_body(error))


def _part(chunk: TextChunk, raw: bool) -> OllamaPart:
    if raw:
        return OllamaPart(chunk.raw_text)
    return OllamaPart(thinking=chunk.text) if chunk.reasoning else OllamaPart(chunk.text)


def _line(value: Mapping[str, Any]) -> bytes:
    return f"{json_line(value)}\n".encode("utf-8", "replace")


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(UTC).isoformat(), "done": False}


def _logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = chat_logprobs(tokens)["content"]
    return {"logprobs": content} if content else {}


def _end(fields: OllamaFields, reply: Reply, generation: Generation, started: int) -> dict[str, Any]:
    """Return the final fields of a reply, such as token counts and durations.

    Args:
        fields: The request's fields.
        reply: The reply.
        generation: The replies to the request.
        started: Time at which the request arrived, from `time.perf_counter_ns`.
    """
    stats = reply.stats
    return {
        "done": True,
        "done_reason": reply.finish_reason,
        "total_duration": time.perf_counter_ns() - started,
        "load_duration": generation.loaded_ns - started,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": round(stats.prefill_seconds * 1e9),
        "eval_count": stats.generated_tokens,
        "eval_duration": round(stats.decode_seconds * 1e9),
        "edgespec": report(reply, fields.ignored_fields()),
    }


class OllamaMessage(ItemFields):
    """A message in the conversation. Fields that only other servers use are ignored."""

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
    """The body of a chat request. A request without messages only loads the model."""

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
    """A reply message, or a part of it."""

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaChat(OllamaReply):
    """The response to a chat request."""

    message: OllamaReplyMessage


@endpoint("POST", "/api/chat", OllamaChatRequest, OllamaChat, streams=True)
async def chat(call: Call[OllamaChatRequest]) -> Response:
    """Reply to a conversation."""
    body = call.body
    if not body.messages:
        return await load_model(call, _formatted_message)
    converted = [_converted_message(index, message) for index, message in enumerate(body.messages)]
    messages = [*system_messages(body.system), *converted]
    offered = offered_tools(body.tools or ())
    choice = checked_choice(body.tool_choice, offered, body.tools or ())
    prompt = ChatPrompt.from_messages(messages, offered.definitions, choice)
    return await respond(call, GenerationRequest(prompt, options_of(body)), _formatted_message)


def _converted_message(index: int, message: OllamaMessage) -> dict[str, Any]:
    place, images = f"messages.{index}.content", []
    if message.role == "tool":
        # An agent cannot remove a tool result from its conversation, so don't reject images in tool results.
        notes = ["[image omitted: text only]"] * len(message.images or ())
        content = "\n".join(filter(None, [result_text(place, message.content), *notes]))
    else:
        content = text_of(place, message.content)
        images = _read_images(message.images, f"messages.{index}.images")
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        "images": images,
        "reasoning": message.thinking or "",
        "tool_calls": message.tool_calls or (),
        "tool_call_id": message.tool_call_id or "",
        "name": message.tool_name or "",
    }


def _formatted_message(part: OllamaPart) -> dict[str, Any]:
    message: OllamaReplyMessage = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if calls := [call for index, each in enumerate(part.tool_calls) if (call := _call(index, each))]:
        message["tool_calls"] = calls
    return {"message": message}


def _call(index: int, call: ToolCall) -> dict[str, Any] | None:
    """Return a tool call in Ollama's format, or None if the reply ended before the call was complete."""
    arguments = parse_object(call.arguments)
    if arguments is None:
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


class OllamaGenerateRequest(OllamaFields):
    """The body of a generate request. A request without a prompt only loads the model."""

    advice = MappingProxyType(
        {
            "messages": "use prompt, or POST /api/chat",
            "tools": "tools work only in chats; use POST /api/chat",
        }
    )

    prompt: str | None = Field(default=None, description="The question or, with raw, the text to continue.")
    system: str | None = Field(default=None, description="The system prompt.")
    raw: bool | None = Field(default=None, description="Continue the prompt without the chat template.")
    images: list[str] | None = Field(default=None, description="Images before the prompt, in base64.")
    # Ollama's client always sends `suffix` and `template`, usually empty.
    suffix: str | None = Field(default=None, description="Must be empty.")
    template: str | None = Field(default=None, description="Must be empty.")
    context: list[int] | None = Field(default=None, description="Must be empty.")


class OllamaGeneration(OllamaReply):
    """The response to a generate request."""

    response: str
    thinking: NotRequired[str]


@endpoint("POST", "/api/generate", OllamaGenerateRequest, OllamaGeneration, streams=True)
async def generate(call: Call[OllamaGenerateRequest]) -> Response:
    """Reply to a prompt, or continue it verbatim."""
    body = call.body
    for name, message in _UNSUPPORTED.items():
        if getattr(body, name):
            raise invalid_request(message, param=name)
    if body.raw and body.system:
        raise invalid_request(
            "raw continues the prompt as it is, without a system prompt; leave out raw or system",
            param="system",
            code="option_conflict",
        )
    if not body.prompt:
        return await load_model(call, _formatted_text)
    return await respond(
        call, GenerationRequest(_generate_prompt(body, body.prompt), options_of(body)), _formatted_text
    )


def _generate_prompt(body: OllamaGenerateRequest, prompt: str) -> ChatPrompt | RawPrompt:
    images = _read_images(body.images, "images")
    if body.raw:
        return RawPrompt(prompt, tuple(each.image for each in images))
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatPrompt([*system, {"role": "user", "content": prompt, "images": images}])


def _formatted_text(part: OllamaPart) -> dict[str, Any]:
    return {"response": part.text, **({"thinking": part.thinking} if part.thinking else {})}
