"""Ollama's API, for programs that support no other server."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from edgespec.server.endpoint import Call, Endpoint, Protocol
from edgespec.server.ollama.embed import (
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    embed,
    embed_prompt,
)
from edgespec.server.ollama.model_list import (
    LoadedModels,
    ModelTags,
    PulledModel,
    PullRequest,
    ShownModel,
    ShowRequest,
    list_loaded,
    list_models,
    pull_model,
    show_model,
)
from edgespec.server.ollama.replies import (
    STREAM_MEDIA_TYPE,
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    chat,
    error_body,
    generate,
)
from edgespec.server.responses import json_response

__all__ = ["OLLAMA"]

# The version of Ollama's API that the server implements. Clients compare it with the oldest version that they
# support, such as 0.6.4 for VS Code, so it must not be edgespec's own version.
_OLLAMA_VERSION = "0.12.11"


class Version(TypedDict):
    """The version of Ollama's API."""

    version: str


async def version(_call: Call[None]) -> Response:
    """Return the version of Ollama's API that the server implements."""
    result: Version = {"version": _OLLAMA_VERSION}
    return json_response(result)


async def running(_call: Call[None]) -> Response:
    """Report that the server is running. Ollama's client checks this before every command."""
    return PlainTextResponse("edgespec is running")


OLLAMA = Protocol(
    "Ollama",
    ("/api/",),
    (
        Endpoint("GET", "/", "Report that the server is running.", running, response=str, public=True),
        Endpoint("GET", "/api/version", "Return the version of Ollama's API.", version, response=Version),
        Endpoint("GET", "/api/tags", "List the models on this machine.", list_models, response=ModelTags),
        Endpoint("GET", "/api/ps", "List the loaded models.", list_loaded, response=LoadedModels),
        Endpoint("POST", "/api/show", "Describe a model.", show_model, ShowRequest, ShownModel),
        Endpoint(
            "POST",
            "/api/pull",
            "Check whether a model is on this machine.",
            pull_model,
            PullRequest,
            PulledModel,
        ),
        Endpoint(
            "POST",
            "/api/chat",
            "Reply to a conversation.",
            chat,
            OllamaChatRequest,
            OllamaChat,
            streams=True,
        ),
        Endpoint(
            "POST",
            "/api/generate",
            "Reply to a prompt, or continue it.",
            generate,
            OllamaGenerateRequest,
            OllamaGeneration,
            streams=True,
        ),
        Endpoint("POST", "/api/embed", "Embed texts.", embed, OllamaEmbedRequest, OllamaEmbeddings),
        Endpoint(
            "POST",
            "/api/embeddings",
            "Compute the embedding of a single text.",
            embed_prompt,
            OllamaEmbeddingRequest,
            OllamaEmbedding,
        ),
    ),
    error_body,
    STREAM_MEDIA_TYPE,
)
