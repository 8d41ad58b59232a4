"""The ASGI application: checks who may use the server, then routes requests to the endpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.server.anthropic import ANTHROPIC
from edgespec.server.endpoint import PathEndpoint, error_response
from edgespec.server.errors import ApiError
from edgespec.server.leniency.origins import ANY_ORIGIN, origins_regex
from edgespec.server.leniency.paths import unknown_path_advice, with_canonical_paths
from edgespec.server.ollama import OLLAMA
from edgespec.server.openai import OPENAI
from edgespec.server.openapi import describe
from edgespec.server.protocol import Endpoint, Protocol
from edgespec.server.security import Guard
from edgespec.server.service import Service
from edgespec.server.system import SYSTEM

__all__ = ["PROTOCOLS", "create_app"]

_log = logging.getLogger(__name__)

# Paths of Ollama's API that change models.
_MODEL_CHANGES = frozenset(f"/api/{name}" for name in ("push", "create", "copy", "delete"))

PROTOCOLS = (SYSTEM, OPENAI, ANTHROPIC, OLLAMA)
"""The protocols that the server speaks."""


def create_app(service: Service) -> ASGIApp:
    """Return the application that serves all APIs."""
    routes = [
        Route(path, PathEndpoint(service, protocol, endpoints))
        for protocol in PROTOCOLS
        for path, endpoints in _by_path(protocol).items()
    ]
    routes.append(Route("/openapi.json", PathEndpoint(service, SYSTEM, {"GET": describe(PROTOCOLS)})))
    public = {each.path for protocol in PROTOCOLS for each in protocol.endpoints if each.public}
    router = Router(routes, redirect_slashes=False, default=_unknown_path)
    app: ASGIApp = Guard(router, service.settings, _protocol_of, frozenset(public))
    if service.settings.allowed_origins:
        # Answer CORS preflight requests, in which browsers ask whether a web page may use the server.
        origins = service.settings.allowed_origins
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
    for endpoint in protocol.endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return paths


def _protocol_of(path: str) -> Protocol:
    """Return the API that the path belongs to: the API with the longest matching prefix."""
    prefixes = {prefix: protocol for protocol in PROTOCOLS for prefix in protocol.prefixes}
    return prefixes[max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default="/")]


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    _log.info("%s %s 404", scope["method"], path[:100])
    message = f"there is nothing at {path[:100]}; {unknown_path_advice(scope)}"
    if path in _MODEL_CHANGES:
        message = (
            f"the server has no {path}, because it does not change the models on this machine; use `edgespec"
            " models pull`, `alias` or `remove` there"
        )
    error = ApiError(404, message, code="not_found")
    await error_response(_protocol_of(path), error)(scope, receive, send)
