"""The dataclasses that define a protocol and its operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from edgespec.server.errors import ApiError
from edgespec.server.fields import RequestFields
from edgespec.server.service import Service

__all__ = ["Call", "Operation", "Protocol"]

_Body = TypeVar("_Body", bound=BaseModel | None)


@dataclass(frozen=True, slots=True)
class Call(Generic[_Body]):
    """A request for an operation, with a validated body.

    Attributes:
        service: The server's state.
        body: The validated body, or None if the operation has none.
        path_values: Values of the parameters in the path.
        headers: The HTTP headers, with lower-case names.
    """

    service: Service
    body: _Body
    path_values: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Operation:
    """An operation of a protocol.

    Attributes:
        method: The HTTP method.
        path: The path, with parameters in braces, as in `/v1/models/{model:path}`.
        summary: One sentence for the OpenAPI description.
        handle: Handles a call. Raises ApiError or any other exception, which `api_error` converts.
        body: The pydantic model of the request body, or None if there is no body.
        response: The `TypedDict` of the JSON response, or str for a text.
        streams: Whether the response can be a stream.
        public: Whether clients need no API key.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    handle: Callable[[Call[Any]], Awaitable[Response]]
    body: type[RequestFields] | None = None
    response: Any = None
    streams: bool = False
    public: bool = False


@dataclass(frozen=True)
class Protocol:
    """A protocol that the server speaks.

    Attributes:
        name: Its name in the OpenAPI description.
        prefixes: Prefixes of its paths. Errors for unknown paths use the format of the protocol with the
            longest matching prefix.
        operations: Its operations.
        error_body: Returns the body of an error response.
        stream_media_type: The media type of streams.
    """

    name: str
    prefixes: tuple[str, ...]
    operations: tuple[Operation, ...]
    error_body: Callable[[ApiError], Mapping[str, Any]]
    stream_media_type: str = "text/event-stream"
