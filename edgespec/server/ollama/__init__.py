"""Ollama's API, for programs that support no other server."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from edgespec.server.endpoint import Call, Protocol, endpoint
from edgespec.server.ollama.embed import embed, embed_prompt
from edgespec.server.ollama.model_list import list_loaded, list_models, pull_model, show_model
from edgespec.server.ollama.replies import STREAM_MEDIA_TYPE, chat, error_body, generate
from edgespec.server.responses import json_response

__all__ = ["OLLAMA"]

# The version of Ollama's API that the server implements. Clients compare it with the oldest version that they
# support, such as 0.6.4 for VS Code, so it must not be edgespec's own version.
_OLLAMA_VERSION = "0.12.11"


class Version(TypedDict):
    """The version of Ollama's API."""

    version: str


@endpoint("GET", "/api/version", response=Version)
async def version(_call: Call[None]) -> Response:
    """Return the version of Ollama's API that the server implements."""
    result: Version = {"version": _OLLAMA_VERSION}
    return json_response(result)


@endpoint("GET", "/", response=str, public=True)
async def running(_call: Call[None]) -> Response:
    """Report that the server is running. Ollama's client checks this before every command."""
    return PlainTextResponse("edgespec is running")


OLLAMA = Protocol(
    "Ollama",
    ("/api/",),
    (
        *(running, version, list_models, list_loaded, show_model, pull_model),
        *(chat, generate, embed, embed_prompt),
    ),
    error_body,
    STREAM_MEDIA_TYPE,
)
