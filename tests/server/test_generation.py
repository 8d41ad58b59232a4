"""Replies to one HTTP request: their events, and cancelling them at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import edgespec
from edgespec import Reply
from edgespec.errors import CancelledError, OptionError
from edgespec.server.generation import ChatPrompt, Generation, GenerationRequest, RawPrompt
from edgespec.server.http_server import HttpServer
from edgespec.server.models import LoadedModel
from tests.server.conftest import MESSAGES, QUESTION, check_disconnect_cancels


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    """The loaded demo model with a queue."""
    loaded = LoadedModel("demo", edgespec.load("demo", "none", method="none", context=1024, threads=1), 4)
    yield loaded
    loaded.close()


def test_events_of_several_replies(model: LoadedModel) -> None:
    async def generate() -> tuple[dict[int, str], list[Reply]]:
        texts = {0: "", 1: ""}
        requests = [GenerationRequest(RawPrompt("One"), {"max_tokens": 6, "seed": seed}) for seed in (1, 2)]
        generation = Generation(model, requests, lambda _: None)
        await generation.start()
        replies = []
        async for index, event in generation.events():
            if isinstance(event, Reply):
                replies.append(event)
            else:
                texts[index] += event.raw_text
        return texts, replies

    texts, replies = asyncio.run(generate())
    assert {reply.seed: reply.text for reply in replies} == {1: texts[0], 2: texts[1]}


def test_cancelling_during_prefill(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Reply | None] = []

    async def generate() -> None:
        prompt = ChatPrompt([{"role": "user", "content": "word " * 700}])
        generation = Generation(model, [GenerationRequest(prompt, {"max_tokens": 20})], ended.append)
        should_continue = generation._should_continue

        def cancel_first(description: str, fraction: float) -> bool:
            # The queue's thread calls this while it processes the prompt.
            generation.cancel()
            return should_continue(description, fraction)

        monkeypatch.setattr(generation, "_should_continue", cancel_first)
        await generation.start()
        with pytest.raises(CancelledError):
            await generation.replies()

    asyncio.run(generate())
    assert all(reply is None or reply.stats.generated_tokens == 0 for reply in ended)


def test_an_invalid_request_cancels_the_others(model: LoadedModel) -> None:
    async def generate() -> None:
        prompt = RawPrompt("One")
        requests = [
            GenerationRequest(prompt, {"max_tokens": 1000}),
            GenerationRequest(prompt, {"max_tokens": 0}),
        ]
        generation = Generation(model, requests, lambda _: None)
        try:
            with pytest.raises(OptionError):
                await generation.start()
        finally:
            generation.cancel()

    asyncio.run(generate())
    assert model.queue.stream("One", max_tokens=2).wait().stats.generated_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/responses", {"input": QUESTION}),
    ],
)
def test_a_disconnect_cancels_the_reply(
    server: HttpServer,
    http: httpx.Client,
    endless: dict[str, Any],
    path: str,
    prompt: dict[str, Any],
    stream: bool,
) -> None:
    check_disconnect_cancels(server, http, path, {**prompt, "stream": stream, **endless})
