"""Find the path that a client intended, even if its base URL is wrong."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["base_url_advice", "canonical_path", "unknown_path_advice", "with_canonical_paths"]

# Path segments found in the base URLs of other servers, such as https://api.groq.com/openai/v1 and
# https://openrouter.ai/api/v1.
_BASES = frozenset({"v1", "api", "openai"})
_MODELS = "/v1/models/"
# Clients that use a proxy, for example because http_proxy is set, send the whole URL as the request target.
_AUTHORITY = re.compile(r"^https?://[^/]*", re.IGNORECASE)


# Advice for endpoints that only other servers have, keyed by their paths without /v1.
_ELSEWHERE: Mapping[tuple[str, ...], str] = {
    (
        "audio",
        "images",
        "videos",
        "realtime",
    ): "edgespec's models cannot create this kind of output, only text",
    ("moderations",): "edgespec has no models for that; use a model with your own prompt",
    ("rerank", "reranking", "score", "api/rerank"): (
        "edgespec has no models for that; compare the vectors from /v1/embeddings"
    ),
    ("completion",): "use /v1/completions",
    ("infill",): "edgespec cannot fill in text before a suffix; use /v1/completions to continue text",
    ("tokenize", "detokenize"): "/v1/messages/count_tokens counts the tokens of a conversation",
    ("apply-template",): "/v1/chat/completions applies the model's chat template itself",
    ("responses",): "the server does not store responses; read the reply to POST /v1/responses",
    (
        "batches",
        "messages/batches",
    ): "the server does not support batches; send the requests one after the other",
    (
        "files",
        "uploads",
        "vector_stores",
        "containers",
    ): "the server does not store files; send their text in a message",
    ("assistants", "threads", "conversations"): (
        "the server does not store conversations; send the whole conversation to /v1/chat/completions"
    ),
    ("fine_tuning", "fine-tunes"): "the server does not train models; use `edgespec train` on its machine",
    ("props", "slots", "version"): "use /v1/models, /health or /metrics",
    (
        "api/v0",
        "api/v1",
    ): "edgespec does not support LM Studio's own API; set the base URL to that of OpenAI's API, /v1",
}


def with_canonical_paths(
    app: ASGIApp, known: Collection[str]
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Wrap an application so that request paths are replaced with their `canonical_path`.

    Args:
        app: The application.
        known: The application's paths that have no parameters.
    """

    async def with_canonical_path(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": canonical_path(scope["path"], known)}
        await app(scope, receive, send)

    return with_canonical_path


def canonical_path(path: str, known: Collection[str]) -> str:
    """Return the known path that the client meant, or the normalised path if there is none.

    The scheme and host of a whole URL are ignored, as are extra slashes. The base URL may have too many parts
    (`/v1/v1/models`) or too few (`/models`), or may include a whole endpoint
    (`/v1/chat/completions/chat/completions`).

    Args:
        path: The path in the request.
        known: All paths that have no parameters.
    """
    parts = [part for part in _AUTHORITY.sub("", path.strip(), count=1).split("/") if part]
    for first in range(len(parts) + 1):
        base, rest = "/" + "/".join(parts[:first]), "/" + "/".join(parts[first:])
        if not _BASES.issuperset(parts[:first]) and base not in known:
            continue
        for candidate in (rest, f"/v1{rest}"):
            # A base URL on its own is not an endpoint.
            if (candidate in known and (rest != "/" or not parts)) or candidate.startswith(_MODELS):
                return candidate
    return "/" + "/".join(parts)


def unknown_path_advice(scope: Scope) -> str:
    """Explain why the server lacks an endpoint that other servers have, or which base URL to set."""
    path = scope["path"].removeprefix("/v1")
    for names, advice in _ELSEWHERE.items():
        if any(path == f"/{name}" or path.startswith(f"/{name}/") for name in names):
            return advice
    return base_url_advice(scope)


def base_url_advice(scope: Scope) -> str:
    """Return advice on which base URL to set in the program that sent a request."""
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    server = f"{scope['scheme']}://{host[:100]}"
    return (
        f"set your program's base URL to {server}/v1 if it uses OpenAI's API, or to {server} if it uses"
        " Anthropic's or Ollama's; /openapi.json lists the paths"
    )
