"""Check whether a client may use the server, before the body of its request is read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.server.endpoint import Protocol, error_response
from edgespec.server.errors import ApiError, invalid_request
from edgespec.server.leniency.origins import is_loopback, is_origin, origins_regex
from edgespec.server.settings import ServerSettings

__all__ = ["Guard"]


class Guard:
    """Middleware that checks the Host header, the Origin header and the API key of requests.

    - If no API key is set, the Host header must name this machine. Otherwise, a web page could reach the
      server by pointing its own host name at 127.0.0.1 (DNS rebinding). HTTP/1.0 requests without the header
      are accepted, because browsers always send it.
    - Requests from web pages, which have an Origin header, are rejected unless the user allowed the origin.
      CORS alone is not enough: browsers send some requests without a preflight, and generating replies to
      them would waste time.

    Args:
        app: The application to protect.
        settings: The server's settings.
        protocol_of: Returns the API that a path belongs to, which determines the error format.
        public_paths: Paths that need no API key.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        protocol_of: Callable[[str], Protocol],
        public_paths: frozenset[str],
    ) -> None:
        self._app, self._protocol_of, self._public_paths = app, protocol_of, public_paths
        key = settings.api_key
        self._key_digest = None if key is None else _digest(key.encode("utf-8", "surrogateescape"))
        origins = settings.allowed_origins
        self._origins = re.compile(origins_regex(origins)) if origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it with 400, 401 or 403."""
        if scope["type"] != "http":
            raise RuntimeError(f"the server does not support {scope['type']}")
        error = self._problem(scope["path"], Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(self._protocol_of(scope["path"]), error)(scope, receive, send)

    def _problem(self, path: str, headers: Headers) -> ApiError | None:
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy could interpret the headers differently and see another request in the body (request
            # smuggling).
            return invalid_request(
                "send either Content-Length or Transfer-Encoding, but not both", code="option_conflict"
            )
        origin = headers.get("origin")
        if origin is not None and not (self._origins and self._origins.fullmatch(origin)):
            allowed = (
                f"--allow-origin {origin}" if len(origin) <= 100 and is_origin(origin) else "--allow-origin"
            )
            page = (
                f"the web page or app {origin[:100]}"
                if origin
                else "a web page that does not send its address"
            )
            return ApiError(
                403,
                f"{page} may not use this server; to allow it, start the server with {allowed}",
                "permission_error",
                "origin_not_allowed",
            )
        if self._key_digest is None:
            host = headers.get("host")
            if host is not None and not is_loopback(_host_name(host)):
                name = f"the host name {host[:100]}" if host else "an empty Host header"
                return ApiError(
                    403,
                    f"the server does not accept {name}, because without an API key it accepts only local"
                    " names; use 127.0.0.1 or localhost, or start the server with an API key",
                    "permission_error",
                    "host_not_allowed",
                )
        elif path not in self._public_paths and not self._has_key(headers):
            return ApiError(
                401,
                "the API key is missing or wrong; send the server's key as `Authorization: Bearer KEY`"
                " or `x-api-key: KEY`",
                "authentication_error",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self._key_digest is not None and hmac.compare_digest(
            _digest(given.encode("latin-1")), self._key_digest
        )


def _digest(key: bytes) -> bytes:
    """Hash a key, so that comparing keys takes the same time regardless of their length."""
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """Return the host name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
