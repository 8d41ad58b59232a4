"""Endpoints that report the server's health and metrics."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

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
    waiting = {model.name: model.queue.waiting for model in call.service.models.loaded}
    text = call.service.metrics.text(waiting)
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
