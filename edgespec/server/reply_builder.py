"""Generate replies for APIs whose streams consist of named events that build up the response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from starlette.responses import Response

from edgespec import Reply, Stats, TextChunk
from edgespec.server.endpoint import Call
from edgespec.server.errors import ApiError
from edgespec.server.generation import Generation, GenerationRequest
from edgespec.server.openai.report import report, timings
from edgespec.server.responses import json_response, open_stream, server_sent_event

__all__ = ["Event", "ReplyBuilder", "respond"]

Event: TypeAlias = dict[str, Any]
"""An event of a stream. Its field `type` is also the name of the server-sent event."""


class ReplyBuilder(Protocol):
    """Builds a response from the chunks of a reply, and yields the events for streaming it.

    Events share objects with the response, which later calls modify. Encode each event before requesting the
    next one.

    Attributes:
        response: The response. Complete after `finish`.
    """

    response: dict[str, Any]

    def start(self, model: str, stats: Stats) -> Iterator[Event]:
        """Begin the response, and yield its first events.

        Args:
            model: Name of the model.
            stats: Statistics so far, including the prompt.
        """

    def add(self, chunk: TextChunk) -> Iterator[Event]:
        """Add a chunk to the response, and yield the events for it."""

    def finish(self, reply: Reply, more: Mapping[str, Any]) -> Iterator[Event]:
        """End the response, and yield its last events.

        Args:
            reply: The reply.
            more: Fields that edgespec adds to the response.
        """


async def respond(
    call: Call[Any],
    request: GenerationRequest,
    builder: ReplyBuilder,
    error_event: Callable[[ApiError], bytes],
) -> Response:
    """Generate a reply and return the response, as a stream if the request has `stream: true`.

    Args:
        call: A request whose body has the fields `model` and `stream`.
        request: The reply to generate.
        builder: Builds the response.
        error_event: Returns the event that reports an error after the stream has started.
    """
    if call.body.stream:
        return await open_stream(_stream(call, request, builder), error_event)
    async with call.service.generate(call.body.model, [request]) as generation:
        async for _ in _events(call, generation, builder):
            pass
        return json_response(builder.response)


async def _stream(
    call: Call[Any], request: GenerationRequest, builder: ReplyBuilder
) -> AsyncGenerator[bytes, None]:
    async with call.service.generate(call.body.model, [request]) as generation:
        async for event in _events(call, generation, builder):
            yield server_sent_event(event, event["type"])


async def _events(call: Call[Any], generation: Generation, builder: ReplyBuilder) -> AsyncIterator[Event]:
    started = False
    async for index, event in generation.events():
        if not started:
            started = True
            for each in builder.start(generation.model_name, generation.stats(index)):
                yield each
        if isinstance(event, TextChunk):
            events = builder.add(event)
        else:
            ignored = call.body.ignored_fields()
            more = {"timings": timings([event]), "edgespec": report(event, ignored)}
            events = builder.finish(event, more)
        for each in events:
            yield each
