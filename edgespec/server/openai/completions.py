"""Handle `POST /v1/completions`, which continues text verbatim."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import MappingProxyType

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec import Reply
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.endpoint import Call, endpoint
from edgespec.server.errors import invalid_request
from edgespec.server.fields import MaxTokensOrZero
from edgespec.server.generation import GenerationRequest, RawPrompt, TokenPrompt
from edgespec.server.models import LoadedModel
from edgespec.server.openai.fields import (
    MAX_CHOICES,
    ChoiceFields,
    Texts,
    error_event,
    requests_options,
    texts_in,
)
from edgespec.server.openai.logprobs import (
    TextLogprobs,
    TextOffsets,
    prompt_logprobs,
    spelled_in,
    text_logprobs,
    wanted_logprobs,
)
from edgespec.server.openai.report import (
    ChoiceStream,
    CompletionHead,
    ReplyReport,
    Timings,
    Usage,
    completion_head,
    report,
    timings,
    usage,
)
from edgespec.server.responses import json_response, open_stream

__all__ = ["CompletionRequest", "create_completion"]


class CompletionRequest(ChoiceFields):
    """The body of a completion request."""

    prompt_field = "prompt"
    advice = MappingProxyType(
        {
            "messages": "use prompt, or POST /v1/chat/completions",
            "system": "put it in prompt, or POST /v1/chat/completions",
            "instructions": "put it in prompt, or POST /v1/chat/completions",
            "suffix": "edgespec cannot fill in text before a suffix; leave it out",
        }
    )

    prompt: Texts = Field(
        description="Text to continue, or a list of texts. Each can also be a list of token IDs."
    )
    # Evaluation harnesses pass 0 to get only the log-probabilities of the prompt.
    max_tokens: MaxTokensOrZero = None
    logprobs: bool | int | None = Field(
        default=None, description="Number of the most likely tokens to return at each position."
    )
    top_logprobs: int | None = Field(default=None, description="Same as a number in logprobs.")
    echo: bool | None = Field(default=None, description="Include the prompt at the start of the text.")
    best_of: int | None = Field(default=None, description="Must equal n.")


class CompletionChoice(TypedDict):
    """One of the continuations."""

    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None
    edgespec: ReplyReport


class Completion(CompletionHead):
    """The response to a completion request."""

    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


@endpoint("POST", "/v1/completions", CompletionRequest, Completion, streams=True)
async def create_completion(call: Call[CompletionRequest]) -> Response:
    """Continue text."""
    body, requests = call.body, _requests(call.body)
    if body.stream:
        return await open_stream(_stream(call, requests), error_event)
    async with call.service.generate(body.model, requests) as generation:
        replies = await generation.replies()
        echoes = [_echoed(body, request, generation.model) for request in requests]
        scores = [
            _prompt_logprobs(body, request, generation.model, reply.prompt_logprobs)
            for request, reply in zip(requests, replies, strict=True)
        ]
        completion: Completion = {
            **completion_head("cmpl", "text_completion", generation.model_name),
            "choices": [
                {
                    "index": index,
                    "text": echoes[index] + reply.text,
                    "finish_reason": reply.finish_reason,
                    "logprobs": _joined(
                        scores[index], _logprobs(reply.logprobs, TextOffsets(len(echoes[index])))
                    ),
                    "edgespec": report(reply, body.ignored_fields()),
                }
                for index, reply in enumerate(replies)
            ],
            "usage": usage(replies, body.n or 1),
            "timings": timings(replies),
        }
        return json_response(completion)


def _requests(body: CompletionRequest) -> list[GenerationRequest]:
    prompts = texts_in(body.prompt)
    choices = body.n or 1
    if not prompts or len(prompts) * choices > MAX_CHOICES:
        raise invalid_request(
            f"the request asks for {len(prompts) * choices} completions; ask for 1 to {MAX_CHOICES}",
            param="prompt",
        )
    if body.best_of not in (None, choices):
        raise invalid_request(f"best_of must equal n, which is {choices}; leave best_of out", param="best_of")
    logprobs = wanted_logprobs(body.logprobs, body.top_logprobs)
    options = [{**each, "logprobs": logprobs} for each in requests_options(body)]
    if (body.echo and logprobs is not None) or body.max_tokens == 0:
        options = [{**each, "prompt_logprobs": logprobs or 0} for each in options]
    return [GenerationRequest(_prompt(text), each) for text in prompts for each in options]


def _prompt(text: str | list[int]) -> RawPrompt | TokenPrompt:
    return RawPrompt(text) if isinstance(text, str) else TokenPrompt(text)


def _echoed(body: CompletionRequest, request: GenerationRequest, model: LoadedModel) -> str:
    prompt = request.prompt
    if not body.echo:
        return ""
    if isinstance(prompt, TokenPrompt):
        vocabulary = model.runtime.vocabulary
        return b"".join(map(vocabulary.piece, prompt.tokens)).decode("utf-8", "replace")
    assert isinstance(prompt, RawPrompt)
    return prompt.text


def _logprobs(tokens: Sequence[TokenLogprobs], offsets: TextOffsets) -> TextLogprobs | None:
    return text_logprobs(tokens, offsets) if tokens else None


def _prompt_logprobs(
    body: CompletionRequest, request: GenerationRequest, model: LoadedModel, tokens: Sequence[TokenLogprobs]
) -> TextLogprobs | None:
    """Return the log-probabilities of a prompt's tokens, or None if they were not requested."""
    if not body.echo or wanted_logprobs(body.logprobs, body.top_logprobs) is None:
        return None
    piece, prompt = model.runtime.vocabulary.piece, request.prompt
    if isinstance(prompt, RawPrompt):
        return prompt_logprobs(tokens, spelled_in(prompt.text, tokens, piece))
    return prompt_logprobs(tokens, [piece(each.token) for each in tokens])


def _joined(first: TextLogprobs | None, second: TextLogprobs | None) -> TextLogprobs | None:
    if not first or not second:
        return first or second
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


async def _stream(
    call: Call[CompletionRequest], requests: list[GenerationRequest]
) -> AsyncGenerator[bytes, None]:
    body = call.body
    async with call.service.generate(body.model, requests) as generation:
        head = completion_head("cmpl", "text_completion", generation.model_name)
        stream = ChoiceStream(body, head, generation, len(requests))
        # Text offsets of the tokens, keyed by reply index.
        offsets: dict[int, TextOffsets] = {}
        async for index, event in generation.events():
            if index not in offsets:
                echo = _echoed(body, requests[index], generation.model)
                offsets[index] = TextOffsets(len(echo))
                tokens = generation.prompt_logprobs(index)
                scores = _prompt_logprobs(body, requests[index], generation.model, tokens)
                if echo or scores:
                    yield stream.event(index, {"text": echo, "logprobs": scores})
            if isinstance(event, Reply):
                ending = {"text": "", "logprobs": None, "finish_reason": event.finish_reason}
                for each in stream.finish(index, ending, event):
                    yield each
            elif event.raw_text or event.logprobs:
                logprobs = _logprobs(event.logprobs, offsets[index])
                yield stream.event(index, {"text": event.raw_text, "logprobs": logprobs})
