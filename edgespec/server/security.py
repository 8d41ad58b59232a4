"""Check whether a client may use the server, before the body of its request is read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import OptionError
from edgespec.server.errors import ApiError, invalid_request

__all__ = ["ANY_ORIGIN", "Guard", "is_loopback", "is_origin", "origins_regex"]


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
        api_key: The key that clients must send, if any.
        allowed_origins: Origins of the web pages that may use the server, in the syntax of `origins_regex`.
        error_response: Returns the response for an error at a path, in the format of the path's API.
        public_paths: Paths that need no API key.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        allowed_origins: tuple[str, ...],
        error_response: Callable[[str, ApiError], Response],
        public_paths: frozenset[str],
    ) -> None:
        self._app, self._error_response, self._public_paths = app, error_response, public_paths
        self._key_digest = None if api_key is None else _digest(api_key.encode("utf-8", "surrogateescape"))
        self._origins = re.compile(origins_regex(allowed_origins)) if allowed_origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it with 400, 401 or 403."""
        if scope["type"] != "http":
            raise RuntimeError(f"the server does not support {scope['type']}")
        error = self._problem(scope["path"], Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._error_response(scope["path"], error)(scope, receive, send)

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
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


ANY_ORIGIN = "*"
"""The pattern that allows every web page and app."""

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:\[\]\s]*)(?::(?P<port>[0-9]{1,5}|\*))?/?",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HOST = re.compile(r"[a-z0-9_.-]*|\[[0-9a-f:.]+\]")
_ANY_PORT = r"(?::[0-9]+)?"


def origins_regex(origins: Iterable[str]) -> str:
    """Return a regular expression matching the allowed origins as browsers send them.

    - Case, a trailing slash and the default port are ignored.
    - `*.example.com` matches any subdomain, `:*` any port, and `chrome-extension://*` any extension.
    - A name for this machine without a port, such as `http://localhost`, allows every port.

    Args:
        origins: The origins as users write them. Each string can contain several, separated by commas.

    Raises:
        OptionError: An item in `origins` is not an origin.
    """
    each = [part for origin in origins for part in origin.split(",")]
    return f"(?i:{'|'.join(map(_regex, each))})"


def is_origin(text: str) -> bool:
    """Return whether `origins_regex` accepts a string as an origin."""
    try:
        return bool(_regex(text))
    except OptionError:
        return False


def _regex(origin: str) -> str:
    text = origin.strip()
    if text == ANY_ORIGIN:
        return ".*"
    if text.lower() == "null":
        return "null"  # Browsers send this for files and other pages without an origin.
    match = _ORIGIN.fullmatch(text)
    if match is None:
        raise OptionError(f"--allow-origin {text[:100]!r} is not an origin", _advice(text))
    scheme, port = match["scheme"].lower(), match["port"] or ""
    host, anything = _ascii_host(match["host"].lower()), ""
    if host == ANY_ORIGIN:
        host, anything = "", "[^/:]+"
    elif host.startswith("*."):
        host, anything = host[1:], "[^/:]+"
    if not _HOST.fullmatch(host):
        raise OptionError(
            f"--allow-origin {text[:100]!r} has an invalid host",
            "write a host such as chat.example.com, or *.example.com for all its subdomains",
        )
    if port == _DEFAULT_PORTS.get(scheme):
        port = ""
    elif port == "*" or (not port and scheme in _DEFAULT_PORTS and is_loopback(host.strip("[]"))):
        return f"{re.escape(scheme)}://{anything}{re.escape(host)}{_ANY_PORT}"
    return re.escape(scheme) + f"://{anything}" + re.escape(host) + (f":{port}" if port else "")


def _ascii_host(host: str) -> str:
    """Return a host name as browsers send it, such as `xn--bcher-kva.example`."""
    try:
        return ".".join(
            label if label.isascii() else label.encode("idna").decode() for label in host.split(".")
        )
    except UnicodeError:
        return host


def _advice(text: str) -> str:
    match = _ORIGIN.match(text)
    if match and match["host"] and text[len(match[0].rstrip("/"))] in "/?#":
        return f"an origin has no path; write {match[0].rstrip('/')}"
    if re.fullmatch(r"[\w.*-]+(:[0-9*]+)?/?", text):
        return f"write {'http' if is_loopback(text.partition(':')[0]) else 'https'}://{text.rstrip('/')}"
    return "write an origin such as https://chat.example.com, http://localhost:3000 or chrome-extension://*"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached only from this machine."""
    # Host names are case-insensitive. A trailing dot marks a fully qualified name.
    if host.removesuffix(".").lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
