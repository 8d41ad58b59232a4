"""Generate the server's OpenAPI description from the definitions of its endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from edgespec import __version__
from edgespec.server.protocol import Call, Endpoint, Protocol
from edgespec.server.responses import json_response

__all__ = ["describe"]

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


def describe(protocols: Sequence[Protocol]) -> Endpoint:
    """Return the endpoint that serves the OpenAPI description of all APIs."""
    document = _document(protocols)

    async def openapi(_call: Call[None]) -> Response:
        return json_response(document)

    return Endpoint("GET", "/openapi.json", "Return this description.", openapi)


def _document(protocols: Sequence[Protocol]) -> dict[str, Any]:
    endpoints = [(protocol, each) for protocol in protocols for each in protocol.endpoints]
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
        "summary": endpoint.summary,
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
