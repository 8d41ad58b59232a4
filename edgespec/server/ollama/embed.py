"""Handle `POST /api/embed` and the older `POST /api/embeddings`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, NotRequired

from pydantic import FailFast, Field
from starlette.responses import Response
from typing_extensions import TypeAliasType, TypedDict

from edgespec.server.endpoint import Call, endpoint
from edgespec.server.fields import Ignored, RequestFields
from edgespec.server.openai.report import IgnoredReport
from edgespec.server.responses import json_response

__all__ = ["embed", "embed_prompt"]

# Define an alias, because a union cannot contain an annotated type directly.
_Texts = TypeAliasType("_Texts", Annotated[list[str], FailFast()])


class _EmbedFields(RequestFields):
    """The fields of both endpoints. Fields that control how a model is loaded are ignored."""

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    options: Ignored
    keep_alive: Ignored


class OllamaEmbedRequest(_EmbedFields):
    """The body of an embed request."""

    input: str | _Texts = Field(description="Text to embed, or a list of texts.")
    truncate: bool | None = Field(
        default=None, description="Cut off the end of texts that do not fit in the context."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Number of dimensions to return, for models that support fewer than their full number.",
    )


class OllamaEmbeddingRequest(_EmbedFields):
    """The body of a request to embed a single text."""

    prompt: str = Field(description="The text.")


class OllamaEmbeddings(TypedDict):
    """The embeddings of all texts. `total_duration` is in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    edgespec: NotRequired[IgnoredReport]


class OllamaEmbedding(TypedDict):
    """The embedding of a single text."""

    embedding: list[float]


@endpoint("POST", "/api/embed", OllamaEmbedRequest, OllamaEmbeddings)
async def embed(call: Call[OllamaEmbedRequest]) -> Response:
    """Embed texts."""
    started = time.perf_counter_ns()
    body = call.body
    texts = [body.input] if isinstance(body.input, str) else body.input
    model, embeddings = await call.service.embed(
        body.model, texts, truncate=bool(body.truncate), dimensions=body.dimensions
    )

    def response() -> Response:
        result: OllamaEmbeddings = {
            "model": model,
            "embeddings": [each.vector.tolist() for each in embeddings],
            "total_duration": time.perf_counter_ns() - started,
            "prompt_eval_count": sum(each.tokens for each in embeddings),
        }
        if ignored := body.ignored_fields():
            result["edgespec"] = {"ignored_fields": ignored}
        return json_response(result)

    # Use a thread, because encoding millions of numbers takes seconds and would block other requests.
    return await asyncio.to_thread(response)


@endpoint("POST", "/api/embeddings", OllamaEmbeddingRequest, OllamaEmbedding)
async def embed_prompt(call: Call[OllamaEmbeddingRequest]) -> Response:
    """Compute the embedding of a single text."""
    _, (embedding,) = await call.service.embed(call.body.model, [call.body.prompt])
    result: OllamaEmbedding = {"embedding": embedding.vector.tolist()}
    return json_response(result)
