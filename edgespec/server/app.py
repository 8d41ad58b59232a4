"""The ASGI application, which checks access to the server and routes requests to the endpoints.

Besides the APIs, it serves a health check, metrics, and an OpenAPI description of all endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict

from edgespec import __version__
from edgespec.server.anthropic import ANTHROPIC
from edgespec.server.endpoint import Call, Endpoint, PathEndpoint, Protocol, endpoint, error_response
from edgespec.server.errors import ApiError
from edgespec.server.leniency.paths import unknown_path_advice, with_canonical_paths
from edgespec.server.ollama import OLLAMA
from edgespec.server.openai import OPENAI
from edgespec.server.openai.fields import error_body
from edgespec.server.responses import json_response
from edgespec.server.security import ANY_ORIGIN, Guard, origins_regex
from edgespec.server.service import Service

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

# Paths of Ollama's endpoints for pushing, creating, copying and deleting models.
_MODEL_CHANGES = frozenset(f"/api/{name}" for name in ("push", "create", "copy", "delete"))

_SCHEMAS = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_ERRORS = {
    400: "The request is invalid.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "There is no such model or path.",
    405: "The path does not support the method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has an encoding that the server does not support.",
    429: "Too many requests are waiting.",
    500: "The server failed.",
    503: "The server is stopping or unloading the model.",
}


def create_app(service: Service) -> ASGIApp:
    """Return the application that serves all APIs."""
    routes = [
        Route(path, PathEndpoint(service, protocol, endpoints))
        for protocol in _PROTOCOLS
        for path, endpoints in _by_path(protocol).items()
    ]
    _document()  # Build it now, because that would keep other requests waiting.
    routes.append(Route("/openapi.json", PathEndpoint(service, _SYSTEM, {"GET": openapi})))
    public = {each.path for protocol in _PROTOCOLS for each in protocol.endpoints if each.public}
    router = Router(routes, redirect_slashes=False, default=_unknown_path)
    key, origins = service.settings.api_key, service.settings.allowed_origins
    app: ASGIApp = Guard(router, key, origins, _error_response, frozenset(public))
    if origins:
        # Answer CORS preflight requests, in which browsers ask whether a web page may use the server.
        app = CORSMiddleware(
            app,
            [ANY_ORIGIN] if ANY_ORIGIN in origins else [],
            allow_origin_regex=origins_regex(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            # Browsers require this when a web page from the internet uses a server on this machine.
            allow_private_network=True,
        )
    return with_canonical_paths(app, [route.path for route in routes if "{" not in route.path])


def _by_path(protocol: Protocol) -> Mapping[str, Mapping[str, Endpoint]]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for each in protocol.endpoints:
        paths.setdefault(each.path, {})[each.method] = each
    return paths


def _error_response(path: str, error: ApiError) -> Response:
    """Return the error response in the format of the API whose prefix is the longest match for a path."""
    prefixes = {prefix: protocol for protocol in _PROTOCOLS for prefix in protocol.prefixes}
    longest = max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default="/")
    return error_response(prefixes[longest], error)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    _log.info("%s %s 404", scope["method"], path[:100])
    message = f"there is nothing at {path[:100]}; {unknown_path_advice(scope)}"
    if path in _MODEL_CHANGES:
        message = (
            f"the server does not support {path}, because it does not change the models on its machine; use"
            " `edgespec models pull`, `alias` or `remove` there"
        )
    error = ApiError(404, message, code="not_found")
    await _error_response(path, error)(scope, receive, send)


class Health(TypedDict):
    """The state of the server."""

    status: str
    loaded: list[str]


@endpoint("GET", "/health", response=Health, public=True)
async def health(call: Call[None]) -> Response:
    """Report that the server is running."""
    state: Health = {"status": "ok", "loaded": [model.name for model in call.service.models.loaded]}
    return json_response(state)


@endpoint("GET", "/metrics", response=str)
async def metrics(call: Call[None]) -> Response:
    """Return the server's counters for Prometheus."""
    gauges = {}
    for model in call.service.models.loaded:
        # Use a thread, because a reply may be holding the prefix cache's lock.
        cache = (await asyncio.to_thread(model.runtime.memory)).prefix_cache
        gauges[model.name] = {
            "requests_waiting": model.queue.waiting,
            "prefix_cache_bytes": cache.memory_bytes,
            "prefix_cache_limit_bytes": cache.memory_limit_bytes,
        }
    text = call.service.metrics.text(gauges)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


_SYSTEM = Protocol("edgespec", (), (health, metrics), error_body)
_PROTOCOLS = (_SYSTEM, OPENAI, ANTHROPIC, OLLAMA)
"""The APIs that the server provides."""


@endpoint("GET", "/openapi.json")
async def openapi(_call: Call[None]) -> Response:
    """Return the OpenAPI description of all APIs."""
    return json_response(_document())


@cache
def _document() -> dict[str, Any]:
    endpoints = [(protocol, each) for protocol in _PROTOCOLS for each in protocol.endpoints]
    bodies = [(each.body, "validation") for _, each in endpoints if each.body]
    _, definitions = models_json_schema(bodies, ref_template=_SCHEMAS)  # type: ignore[arg-type]
    schemas = definitions.get("$defs", {})
    paths: dict[str, dict[str, Any]] = {}
    for protocol, each in endpoints:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(protocol, each, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(protocol: Protocol, endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.response is str:
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        schema = TypeAdapter(endpoint.response).json_schema(ref_template=_SCHEMAS)
        schemas.update(schema.pop("$defs", {}))
        content["application/json"] = {"schema": schema}
    if endpoint.streams:
        content[protocol.stream_media_type] = {"schema": {"type": "string"}}
    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
        for status, text in _ERRORS.items()
    }
    described: dict[str, Any] = {
        "summary": (endpoint.handle.__doc__ or "").partition("\n")[0],
        "tags": [protocol.name],
        "responses": {"200": {"description": "The result.", "content": content}, **errors},
    }
    if endpoint.body:
        reference = _SCHEMAS.format(model=endpoint.body.__name__)
        body = {"application/json": {"schema": {"$ref": reference}}}
        described["requestBody"] = {"required": True, "content": body}
    if names := _PARAMETER.findall(endpoint.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described
