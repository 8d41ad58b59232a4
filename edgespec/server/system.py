"""Endpoints that report the server's health and metrics."""

from __future__ import annotations

import asyncio

from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from edgespec.server.metrics import ModelGauges
from edgespec.server.openai.errors import error_body
from edgespec.server.protocol import Call, Endpoint, Protocol
from edgespec.server.responses import json_response

__all__ = ["SYSTEM"]


class Health(TypedDict):
    """The state of the server."""

    status: str
    loaded: list[str]


async def health(call: Call[None]) -> Response:
    """Report that the server is running."""
    state: Health = {"status": "ok", "loaded": [model.name for model in call.service.models.loaded]}
    return json_response(state)


async def metrics(call: Call[None]) -> Response:
    """Return the server's counters for Prometheus."""
    gauges = {}
    for model in call.service.models.loaded:
        # Wait in a thread, because a reply may hold the lock of the prefix cache.
        cache = (await asyncio.to_thread(model.runtime.memory)).prefix_cache
        gauges[model.name] = ModelGauges(model.queue.waiting, cache.memory_bytes, cache.memory_limit_bytes)
    text = call.service.metrics.text(gauges)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


SYSTEM = Protocol(
    "edgespec",
    (),
    (
        Endpoint(
            "GET", "/health", "Report that the server is running.", health, response=Health, public=True
        ),
        Endpoint("GET", "/metrics", "Return the server's counters for Prometheus.", metrics, response=str),
    ),
    error_body,
)
