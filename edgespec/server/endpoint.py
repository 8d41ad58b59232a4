"""Declare the server's APIs and endpoints, and serve them as ASGI applications.

Serving a request means reading and validating its body, calling the handler, and reporting errors.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edgespec.errors import BusyError, EdgespecError
from edgespec.server.errors import ApiError, api_error, validation_error
from edgespec.server.fields import RequestFields
from edgespec.server.leniency.body import parse_body
from edgespec.server.leniency.paths import base_url_advice
from edgespec.server.responses import SEND_SECONDS, json_response
from edgespec.server.service import Service
from edgespec.system.files import format_bytes

__all__ = ["Call", "Endpoint", "PathEndpoint", "Protocol", "endpoint", "error_response"]

_Body = TypeVar("_Body", bound=BaseModel | None)
# Maximum size of a request body in bytes. A prompt of a million tokens takes about 5 MB, as does a photo.
MAX_BODY_BYTES = 48 * 2**20
# Maximum combined size in bytes of all request bodies being received. Prevents clients from exhausting
# memory.
MAX_BUFFERED_BYTES = 4 * MAX_BODY_BYTES
# Timeout in seconds for receiving the whole body.
BODY_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call(Generic[_Body]):
    """A request to an endpoint, with a validated body.

    Attributes:
        service: The server's state.
        body: The validated body, or None if the endpoint has none.
        path_values: Values of the parameters in the path.
        headers: The HTTP headers, with lower-case names.
    """

    service: Service
    body: _Body
    path_values: Mapping[str, str]
    headers: Mapping[str, str]


_Handler: TypeAlias = Callable[[Call[Any]], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of an API. Created by the decorator `endpoint`.

    Attributes:
        handle: Handles a call. Exceptions other than ApiError are converted by `api_error`. The first line of
            its docstring is the endpoint's summary in the OpenAPI description.
        method: The HTTP method.
        path: The path, with parameters in braces, as in `/v1/models/{model:path}`.
        body: The pydantic model of the request body, or None if there is no body.
        response: The `TypedDict` of the JSON response, or str for plain text.
        streams: Whether the endpoint can stream its response.
        public: Whether clients can use it without an API key.
    """

    handle: _Handler
    method: Literal["GET", "POST"]
    path: str
    body: type[RequestFields] | None = None
    response: Any = None
    streams: bool = False
    public: bool = False


def endpoint(
    method: Literal["GET", "POST"],
    path: str,
    body: type[RequestFields] | None = None,
    response: Any = None,
    *,
    streams: bool = False,
    public: bool = False,
) -> Callable[[_Handler], Endpoint]:
    """Return a decorator that makes a handler an `Endpoint` with these attributes."""
    return lambda handle: Endpoint(handle, method, path, body, response, streams, public)


@dataclass(frozen=True)
class Protocol:
    """One of the APIs that the server provides, such as OpenAI's.

    Attributes:
        name: The API's name in the OpenAPI description.
        prefixes: Path prefixes of the API. Errors for unknown paths use the format of the API with the
            longest matching prefix.
        endpoints: The API's endpoints.
        error_body: Returns the body of an error response.
        stream_media_type: The media type of streams.
    """

    name: str
    prefixes: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]
    error_body: Callable[[ApiError], Mapping[str, Any]]
    stream_media_type: str = "text/event-stream"


class PathEndpoint:
    """An ASGI application that serves all endpoints with the same path.

    Args:
        service: The server's state.
        protocol: The protocol that the endpoints belong to.
        endpoints: The endpoints, keyed by HTTP method.
    """

    def __init__(self, service: Service, protocol: Protocol, endpoints: Mapping[str, Endpoint]) -> None:
        self._service, self._protocol, self._endpoints = service, protocol, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. If the client disconnects, cancel the handler."""
        started = time.monotonic()
        endpoint = self._endpoints.get("GET" if scope["method"] == "HEAD" else scope["method"])
        path = endpoint.path if endpoint else next(iter(self._endpoints.values())).path
        status = 499  # As in nginx, the client closed the connection before the response.

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            body = await self._read(endpoint, scope, receive)
            if isinstance(body, ApiError):
                response = error_response(self._protocol, body)
                async with asyncio.timeout(SEND_SECONDS):
                    await response(scope, receive, counting_send)
            elif endpoint:
                await _unless_disconnected(
                    self._respond(endpoint, body, scope, receive, counting_send), receive
                )
        except (ClientDisconnect, TimeoutError):
            pass
        finally:
            self._service.metrics.count_request(path, status)
            _log.info("%s %s %s %.2f s", scope["method"], path, status, time.monotonic() - started)

    async def _read(
        self, endpoint: Endpoint | None, scope: Scope, receive: Receive
    ) -> BaseModel | ApiError | None:
        """Return the validated body, or the error if it is invalid."""
        if endpoint is None:
            allowed = ", ".join(self._endpoints)
            return ApiError(
                405,
                f"{scope['method']} {scope['path'][:100]} is not supported; use {allowed}, or"
                f" {base_url_advice(scope)}",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        try:
            data = await self._read_body(scope, receive)
            if endpoint.body is None:
                return None
            return parse_body(data, Headers(scope=scope), endpoint.body.model_validate_json)
        except (ApiError, BusyError) as error:
            return api_error(error)
        except ValidationError as error:
            body = endpoint.body or RequestFields
            return validation_error(error, body.known_fields(), body.advice)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the request's body.

        Raises:
            ApiError: The body is too large or takes too long.
            ClientDisconnect: The client disconnected.
        """
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    body += part
                    self._service.buffered_bytes += len(part)
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
                    if self._service.buffered_bytes > MAX_BUFFERED_BYTES:
                        raise BusyError(
                            "too many large requests are arriving at once",
                            "try again later",
                            code="queue_full",
                        )
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request body did not arrive within {BODY_SECONDS:.0f} seconds; send it again",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        finally:
            self._service.buffered_bytes -= len(body)

    async def _respond(
        self, endpoint: Endpoint, body: BaseModel | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            call = Call(self._service, body, scope.get("path_params", {}), Headers(scope=scope))
            response = await endpoint.handle(call)
        except Exception as error:
            if not isinstance(error, EdgespecError | ApiError):
                # Do not log the exception's message, because it may contain text from the prompt.
                frames = "".join(traceback.format_tb(error.__traceback__))
                _log.error("%s in %s:\n%s", type(error).__name__, endpoint.path, frames)
            prompt_field = endpoint.body.prompt_field if endpoint.body else None
            response = error_response(self._protocol, api_error(error, prompt_field))
        await response(scope, receive, send)


def error_response(protocol: Protocol, error: ApiError) -> Response:
    """Return an error response in the format of the API."""
    return json_response(protocol.error_body(error), error.status, error.headers)


def _too_large() -> ApiError:
    limit = format_bytes(MAX_BODY_BYTES)
    return ApiError(
        413,
        f"the request body is larger than {limit}; shorten the prompt",
        code="request_too_large",
    )


async def _unless_disconnected(work: Any, receive: Receive) -> None:
    """Await `work`, but cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
