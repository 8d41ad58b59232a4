"""Handle `GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec.server.endpoint import Call, endpoint
from edgespec.server.models import KnownModel
from edgespec.server.openai.report import ExactnessReport, exactness_report
from edgespec.server.responses import json_response

__all__ = ["list_models", "retrieve_model"]


class ModelMeta(TypedDict):
    """Properties of a model, named as in llama-server.

    `n_ctx` is the maximum length of prompt plus reply in tokens. It is known only once the model is loaded.
    """

    n_ctx: int | None
    n_ctx_train: int | None
    n_params: int | None
    n_vocab: int | None
    size: int | None


class Model(TypedDict):
    """A model that requests can name, with the fields of both OpenAI's and Anthropic's APIs.

    `exactness` says whether replies are identical to plain decoding. It is null until the model is loaded.
    """

    id: str
    object: str
    created: int
    type: str
    display_name: str
    created_at: str
    owned_by: str
    loaded: bool
    exactness: ExactnessReport | None
    meta: ModelMeta


class ModelList(TypedDict):
    """The models that requests can name. The last three fields are for pagination, as in Anthropic's API."""

    object: str
    data: list[Model]
    first_id: str | None
    last_id: str | None
    has_more: bool


@endpoint("GET", "/v1/models", response=ModelList)
async def list_models(call: Call[None]) -> Response:
    """List the models on this machine, starting with the server's own."""
    data = [_model(known) for known in await call.service.models.known()]
    models: ModelList = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": False,
    }
    return json_response(models)


@endpoint("GET", "/v1/models/{model:path}", response=Model)
async def retrieve_model(call: Call[None]) -> Response:
    """Describe a model."""
    return json_response(_model(await call.service.models.describe(call.path_values["model"])))


def _model(known: KnownModel) -> Model:
    info = known.info
    return {
        "id": known.name,
        "object": "model",
        "created": known.created,
        "type": "model",
        "display_name": known.name,
        "created_at": datetime.fromtimestamp(known.created, UTC).isoformat(),
        "owned_by": "edgespec",
        "loaded": known.loaded is not None,
        "exactness": exactness_report(known.loaded.runtime.exactness_for()) if known.loaded else None,
        "meta": {
            "n_ctx": known.loaded.runtime.context_tokens if known.loaded else None,
            "n_ctx_train": info.context_tokens if info else None,
            "n_params": info.parameters if info else None,
            "n_vocab": info.vocab_size if info else None,
            "size": info.size_bytes if info else None,
        },
    }
