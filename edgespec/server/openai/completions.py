"""Handle `POST /v1/completions`, which continues a text verbatim."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec import Reply
from edgespec.reply import TokenLogprobs
from edgespec.server.errors import invalid_request
from edgespec.server.generation import ReplyRequest, TextPrompt
from edgespec.server.openai.errors import error_event
from edgespec.server.openai.fields import MAX_CHOICES, ChoiceFields, requests_options
from edgespec.server.openai.logprobs import TextLogprobs, text_logprobs
from edgespec.server.openai.report import Report, Timings, Usage, report, timings, usage
from edgespec.server.protocol import Call
from edgespec.server.responses import json_response, open_stream, server_sent_event

__all__ = ["Completion", "CompletionRequest", "create_completion"]


# Defined as an alias, because a union cannot contain an annotated type directly.
_Prompts = TypeAliasType("_Prompts", Annotated[list[str], FailFast()])


class CompletionRequest(ChoiceFields):
    """The body of a completion request."""

    prompt_field = "prompt"
    advice = MappingProxyType(
        {
            "messages": "use prompt, or POST /v1/chat/completions",
            "suffix": "edgespec cannot fill in text before a suffix; leave it out",
        }
    )

    prompt: str | _Prompts = Field(description="The text to continue, or several texts.")
    echo: bool | None = Field(default=None, description="Repeat the prompt before the text.")
    best_of: int | None = Field(default=None, description="Must equal n.")


class CompletionChoice(TypedDict):
    """One of the continuations."""

    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None
    edgespec: Report


class Completion(TypedDict):
    """The response to a completion request."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


async def create_completion(call: Call[CompletionRequest]) -> Response:
    """Continue the texts of a request."""
    body, requests = call.body, _requests(call.body)
    if body.stream:
        return await open_stream(_stream(call, requests), error_event)
    async with call.service.generate(body.model, requests) as generation:
        replies = await generation.replies()
        completion: Completion = {
            "id": _new_id(),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or generation.model.name,
            "choices": [
                {
                    "index": index,
                    "text": _echoed(body, requests[index]) + reply.text,
                    "finish_reason": reply.finish_reason,
                    "logprobs": _logprobs(reply.logprobs, _echoed(body, requests[index])),
                    "edgespec": report(reply, body.ignored_fields()),
                }
                for index, reply in enumerate(replies)
            ],
            "usage": usage(replies, body.n or 1),
            "timings": timings(replies),
        }
        return json_response(completion)


def _requests(body: CompletionRequest) -> list[ReplyRequest]:
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    choices = body.n or 1
    if not prompts or len(prompts) * choices > MAX_CHOICES:
        raise invalid_request(
            f"the request asks for {len(prompts) * choices} completions; ask for 1 to {MAX_CHOICES}",
            param="prompt",
        )
    if body.best_of not in (None, choices):
        raise invalid_request(f"best_of must equal n, which is {choices}; leave best_of out", param="best_of")
    return [
        ReplyRequest(TextPrompt(prompt), options) for prompt in prompts for options in requests_options(body)
    ]


def _new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


def _echoed(body: CompletionRequest, request: ReplyRequest) -> str:
    return request.prompt.text if body.echo and isinstance(request.prompt, TextPrompt) else ""


def _logprobs(tokens: Sequence[TokenLogprobs], before: str) -> TextLogprobs | None:
    return text_logprobs(tokens, len(before)) if tokens else None


async def _stream(call: Call[CompletionRequest], requests: list[ReplyRequest]) -> AsyncGenerator[bytes, None]:
    """Yield the events of streamed texts. The usage is sent as for chat completions."""
    body = call.body
    own_event = bool(body.stream_options and body.stream_options.include_usage)
    async with call.service.generate(body.model, requests) as generation:
        head = {
            "id": _new_id(),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or generation.model.name,
        }
        written = [_echoed(body, request) for request in requests]
        started: set[int] = set()
        replies: dict[int, Reply] = {}
        async for index, event in generation.events():
            if index not in started:
                started.add(index)
                if written[index]:
                    yield _chunk(head, index, written[index])
            if not isinstance(event, Reply):
                if event.raw_text or event.logprobs:
                    logprobs = _logprobs(event.logprobs, written[index])
                    yield _chunk(head, index, event.raw_text, logprobs=logprobs)
                written[index] += event.raw_text
                continue
            replies[index] = event
            is_last = len(replies) == len(requests)
            ended = [replies[place] for place in sorted(replies)]
            totals = {"usage": usage(ended, body.n or 1), "timings": timings(ended)} if is_last else {}
            yield _chunk(
                {**head, **({} if own_event else totals)},
                index,
                "",
                finish_reason=event.finish_reason,
                edgespec=report(event, body.ignored_fields()),
            )
            if is_last and own_event:
                yield server_sent_event({**head, "choices": [], **totals})
        yield server_sent_event("[DONE]")


def _chunk(head: dict[str, Any], index: int, text: str, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None, **more}
    return server_sent_event({**head, "choices": [choice]})
