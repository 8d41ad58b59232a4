"""Dataclasses that describe the server's APIs and their endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from edgespec.server.errors import ApiError
from edgespec.server.fields import RequestFields
from edgespec.server.service import Service

__all__ = ["Call", "Endpoint", "Protocol"]

_Body = TypeVar("_Body", bound=BaseModel | None)


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


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of an API.

    Attributes:
        method: The HTTP method.
        path: The path, with parameters in braces, as in `/v1/models/{model:path}`.
        summary: A sentence for the OpenAPI description.
        handle: Handles a call. Exceptions other than ApiError are converted by `api_error`.
        body: The pydantic model of the request body, or None if there is no body.
        response: The `TypedDict` of the JSON response, or str for plain text.
        streams: Whether the endpoint can stream its response.
        public: Whether clients can use it without an API key.
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
    """One of the APIs that the server provides, such as OpenAI's.

    Attributes:
        name: The API's name in the OpenAPI description.
        prefixes: Prefixes of the API's paths. Errors for unknown paths have the format of the API with the
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
