"""Handle `POST /v1/embeddings`, which returns vectors that represent the meaning of text."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec import Embedding
from edgespec.server.endpoint import Call, endpoint
from edgespec.server.errors import invalid_request
from edgespec.server.fields import Ignored, RequestFields
from edgespec.server.openai.fields import Texts, texts_in
from edgespec.server.openai.report import IgnoredReport
from edgespec.server.responses import json_response

__all__ = ["create_embeddings"]

# Maximum number of texts in a request, as in OpenAI's API.
MAX_TEXTS = 2048


class EmbeddingRequest(RequestFields):
    """The body of an embedding request."""

    prompt_field = "input"

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    input: Texts = Field(
        description="Text to embed, or a list of texts. Each can also be a list of token IDs."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64 returns the vectors as base64-encoded float32 values."
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Number of dimensions to return, for models that support fewer than their full number.",
    )
    user: Ignored


class EmbeddingItem(TypedDict):
    """The embedding of one of the texts."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """The token counts of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The embeddings of all texts, in request order. Mistral's clients require the id."""

    id: str
    object: str
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    edgespec: NotRequired[IgnoredReport]


@endpoint("POST", "/v1/embeddings", EmbeddingRequest, EmbeddingList)
async def create_embeddings(call: Call[EmbeddingRequest]) -> Response:
    """Embed texts."""
    texts = _texts(call.body)
    model, embeddings = await call.service.embed(call.body.model, texts, dimensions=call.body.dimensions)
    # Use a thread, because encoding millions of numbers takes seconds and would block other requests.
    return await asyncio.to_thread(_response, call.body, model, embeddings)


def _texts(body: EmbeddingRequest) -> list[str | list[int]]:
    texts = texts_in(body.input)
    if not 0 < len(texts) <= MAX_TEXTS:
        raise invalid_request(f"input has {len(texts)} texts; send 1 to {MAX_TEXTS}", param="input")
    return texts


def _response(body: EmbeddingRequest, model: str, embeddings: Sequence[Embedding]) -> Response:
    tokens = sum(each.tokens for each in embeddings)
    result: EmbeddingList = {
        "id": f"embd-{secrets.token_hex(12)}",
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(each, body.encoding_format)}
            for index, each in enumerate(embeddings)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if ignored := body.ignored_fields():
        result["edgespec"] = {"ignored_fields": ignored}
    return json_response(result)


def _encoded(embedding: Embedding, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(embedding.vector.astype("<f4").tobytes()).decode()
    values: list[float] = embedding.vector.tolist()
    return values
