"""Generate a reply and send it as JSON or as a stream of JSON lines, for chat and generate requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec import Reply, TextChunk
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.errors import ApiError, invalid_request
from edgespec.server.generation import Generation, ReplyRequest, TextPrompt
from edgespec.server.ollama.fields import OllamaFields, ignored_fields
from edgespec.server.openai.logprobs import ContentLogprob, chat_logprobs
from edgespec.server.openai.report import ReplyReport, report
from edgespec.server.protocol import Call
from edgespec.server.responses import json_line, json_response, open_stream

__all__ = ["STREAM_MEDIA_TYPE", "OllamaPart", "OllamaReply", "error_body", "load_model", "respond"]

STREAM_MEDIA_TYPE = "application/x-ndjson"


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
"""Returns the fields that contain a part of a reply."""


async def respond(call: Call[Any], request: ReplyRequest, formatted: Formatter) -> Response:
    """Generate a reply and return the response: a stream, unless the request has `stream: false`.

    Args:
        call: A request whose body is an `OllamaFields`.
        request: The reply to generate.
        formatted: Formats the parts of the reply.
    """
    fields: OllamaFields = call.body
    if fields.top_logprobs and fields.wanted_logprobs is None:
        raise invalid_request(
            "top_logprobs requires logprobs: true; set logprobs to true, or leave both out",
            param="top_logprobs",
        )
    if fields.stream is not False:
        return await open_stream(_stream(call, request, formatted), _error_line, STREAM_MEDIA_TYPE)
    started = time.perf_counter_ns()
    async with call.service.generate(fields.model, [request]) as generation:
        (reply,) = await generation.replies()
        raw = isinstance(request.prompt, TextPrompt)
        part = OllamaPart(reply.text) if raw else OllamaPart(reply.answer, reply.reasoning, reply.tool_calls)
        logprobs = _logprobs(reply.logprobs) if fields.wanted_logprobs is not None else {}
        head = _head(generation.model_name)
        end = _end(fields, reply, generation, started)
        response = json_response({**head, **formatted(part), **logprobs, **end})
    if fields.unloads:
        await call.service.models.unload(fields.model)
    return response


async def _stream(
    call: Call[Any], request: ReplyRequest, formatted: Formatter
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a streamed reply. Ollama does not split tool calls, so they follow the text."""
    fields: OllamaFields = call.body
    started = time.perf_counter_ns()
    async with call.service.generate(fields.model, [request]) as generation:
        raw = isinstance(request.prompt, TextPrompt)
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
    """Load the model of a request without a prompt, as Ollama does, so that the next reply starts sooner.

    With `keep_alive: 0`, the model is unloaded instead.
    """
    fields: OllamaFields = call.body
    models = call.service.models
    found = await models.find(fields.model)
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
    """Return the closing fields of a reply.

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
        "edgespec": report(reply, ignored_fields(fields)),
    }
